"""Models of transformers from a small configuration, on random data: configured.py NAME.

Written for this table.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

_MAKE = torch.Generator().manual_seed(1)


#: A model, and what makes one row of its data.
Job = tuple[Any, Callable[[], dict[str, torch.Tensor]]]


def _words(*size: int, words: int = 500) -> torch.Tensor:
    return torch.randint(1, words, size, generator=_MAKE)


def _numbers(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=_MAKE)


def _translator() -> Job:
    config = transformers.T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), lambda: {"input_ids": _words(40), "labels": _words(24)}


def _contrastive() -> Job:
    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**common, "vocab_size": 500, "max_position_embeddings": 32, "eos_token_id": 499},
        vision_config={**common, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    return transformers.CLIPModel(config), lambda: {"input_ids": _words(20), "pixel_values": _numbers(3, 32, 32)}


def _listener() -> Job:
    config = transformers.WhisperConfig(
        vocab_size=500,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=20,
        max_source_positions=50,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, lambda: {"input_features": _numbers(20, 100), "labels": _words(20)}


def _language(model: Any) -> Job:
    def row() -> dict[str, torch.Tensor]:
        words = _words(32)
        return {"input_ids": words, "labels": words}

    return model, row


def _recurrent() -> Job:
    config = transformers.MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, state_size=8)
    return _language(transformers.MambaForCausalLM(config))


def _experts() -> Job:
    config = transformers.MixtralConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    return _language(transformers.MixtralForCausalLM(config))


def _segments() -> Job:
    config = transformers.SegformerConfig(
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=64,
        num_labels=5,
        num_attention_heads=[1, 2, 4, 8],
    )
    model = transformers.SegformerForSemanticSegmentation(config)
    return model, lambda: {"pixel_values": _numbers(3, 64, 64), "labels": _words(64, 64, words=5)}


MODELS = {
    "t5": _translator,
    "clip": _contrastive,
    "whisper": _listener,
    "mamba": _recurrent,
    "mixtral": _experts,
    "segformer": _segments,
}


def main() -> None:
    """Trains for ten steps, with a schedule and clipping."""
    torch.manual_seed(0)
    model, row = MODELS[sys.argv[1]]()
    model.train()
    rows = [row() for _ in range(80)]
    more = {"return_loss": True} if sys.argv[1] == "clip" else {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for step, batch in enumerate(torch.utils.data.DataLoader(rows, batch_size=8)):  # type: ignore[arg-type]
        out = model(**batch, **more)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {out.loss.item():.6f}")


if __name__ == "__main__":
    main()
