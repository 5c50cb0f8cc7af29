"""Fine-tunes ViT-L/16 wholly in bfloat16 on batches of 16, as the article's fourth script."""

from families.vit_l_16 import finetune

if __name__ == "__main__":
    finetune(batch=16, precision="bf16-true")
