"""Fine-tunes ViT-L/16 wholly in bfloat16 on batches of 64, as the article's third script."""

from families.vit_l_16 import finetune

if __name__ == "__main__":
    finetune(batch=64, precision="bf16-true")
