"""Trains GPT-2 from scratch modules wholly in bfloat16: the list's improvements 1 to 5."""

from families.gpt2 import Variant, train

if __name__ == "__main__":
    train(
        Variant(
            stored_mask=False,
            tensor_cores=True,
            fused_optimizer=True,
            bfloat16=True,
            native_modules=False,
            flash_attention=False,
        )
    )
