"""Fine-tunes ViT-L/16 in float32 on batches of 64, as the article's first script."""

from families.vit_l_16 import finetune

if __name__ == "__main__":
    finetune(batch=64, precision="32-true")
