"""Trains GPT-2 with PyTorch's scaled_dot_product_attention: the list's improvements 1 to 7."""

from families.gpt2 import Variant, train

if __name__ == "__main__":
    train(
        Variant(
            stored_mask=False,
            tensor_cores=True,
            fused_optimizer=True,
            bfloat16=True,
            native_modules=True,
            flash_attention=True,
        )
    )
