"""Trains GPT-2 with PyTorch's LayerNorm and GELU: the list's improvements 1 to 6."""

from families.gpt2 import Variant, train

if __name__ == "__main__":
    train(
        Variant(
            stored_mask=False,
            tensor_cores=True,
            fused_optimizer=True,
            bfloat16=True,
            native_modules=True,
            flash_attention=False,
        )
    )
