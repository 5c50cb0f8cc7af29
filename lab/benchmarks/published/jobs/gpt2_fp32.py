"""Trains GPT-2 from scratch modules in float32, as the book's 00_orig.py."""

from families.gpt2 import Variant, train

if __name__ == "__main__":
    train(
        Variant(
            stored_mask=True,
            tensor_cores=False,
            fused_optimizer=False,
            bfloat16=False,
            native_modules=False,
            flash_attention=False,
        )
    )
