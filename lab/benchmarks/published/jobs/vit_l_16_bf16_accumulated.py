"""Fine-tunes ViT-L/16 wholly in bfloat16 on four batches of 4 a step, as the article's fifth script."""

from families.vit_l_16 import finetune

if __name__ == "__main__":
    finetune(batch=4, precision="bf16-true", accumulate=4)
