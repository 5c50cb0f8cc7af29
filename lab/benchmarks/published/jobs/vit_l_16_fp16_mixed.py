"""Fine-tunes ViT-L/16 under float16 autocast on batches of 64, as the article's second script."""

from families.vit_l_16 import finetune

if __name__ == "__main__":
    finetune(batch=64, precision="16-mixed")
