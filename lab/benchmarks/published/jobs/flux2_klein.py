"""Fine-tunes FLUX.2-klein-base-4B with an adapter of PEFT, on two images of 512 x 512, and prints what it reserved.

The argument is the adapter's name in families/flux2_adapters.toml, or that of full fine-tuning. What happens on the
device follows PEFT's method comparison for image generation: prompts and images are encoded first, by models that leave
the device again, and DINOv2 stays on it.
"""

from __future__ import annotations

import sys

import torch
from families.flux2_klein import (
    FULL,
    PROMPT_LAYERS,
    PROMPT_TOKENS,
    make_adapter,
    make_autoencoder,
    make_judge,
    make_text_encoder,
    make_transformer,
)
from families.setting import DEVICE, report_peak
from peft import get_peft_model
from torch import nn

#: Images to train on, each with a prompt, and how many of the prompts are encoded; the others are copies, to save time.
IMAGES, ENCODED = 14, 2
#: Numbers that the steps count by: AdaLoRA chooses ranks from the hundredth on.
STEPS = (1, 2, 101)


def main(name: str) -> None:
    """Trains a few steps."""
    nn.Linear(1, 1).to(DEVICE)
    reserved = torch.cuda.max_memory_reserved()
    transformer = make_transformer()
    transformer.enable_gradient_checkpointing()
    transformer = transformer.to(DEVICE)
    if name == FULL:
        transformer.requires_grad_(True)
    else:
        transformer = get_peft_model(transformer, make_adapter(name))
    transformer.to("cpu")
    torch.cuda.empty_cache()
    transformer.train()

    images = [torch.randn(3, 512, 512) for _ in range(IMAGES)]
    generator = torch.Generator(DEVICE).manual_seed(0)
    judge = make_judge().to(DEVICE)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4, weight_decay=1e-4)
    prompts, text_ids = encode_prompts()
    latents = encode_images(images)
    transformer.to(DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses, peak = [], 0
    for index, step in enumerate(STEPS):
        if step == STEPS[-1]:  # images are generated after the hundredth step, and the cache is emptied
            peak = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        chosen = torch.tensor([2 * index, 2 * index + 1], device=DEVICE)
        sample, text, ids = latents[chosen], prompts[chosen], text_ids[chosen]
        positions = image_positions(sample).to(DEVICE)
        noise = torch.randn(sample.shape, dtype=sample.dtype, device=DEVICE, generator=generator)
        sigmas = torch.rand(len(sample)).to(sample.dtype)[:, None, None, None].to(DEVICE)
        timesteps = torch.rand(len(sample)).to(DEVICE)
        noisy = pack((1.0 - sigmas) * sample + sigmas * noise)
        optimizer.zero_grad(set_to_none=True)
        predicted = transformer(
            hidden_states=noisy,
            timestep=timesteps,
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=ids,
            img_ids=positions,
            return_dict=False,
        )[0]
        predicted = unpack(predicted[:, : noisy.size(1)], positions, sample.shape[-1])
        weighting = torch.ones_like(sigmas)
        target = noise - sample
        errors = (weighting.float() * (predicted.float() - target.float()) ** 2).reshape(len(target), -1)
        loss = torch.mean(errors, 1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        if hasattr(getattr(transformer, "base_model", None), "update_and_allocate"):
            transformer.base_model.update_and_allocate(step)
        loss = loss.detach()
        losses.append(loss)
        allocated = torch.cuda.memory_allocated() - reserved
    report_peak(reserved=max(peak, torch.cuda.max_memory_reserved()) - reserved, allocated_after_step=allocated)
    del judge


@torch.no_grad()
def encode_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the embedded prompts [image, token, feature] and the positions of their tokens [image, token, 4]."""
    encoder = make_text_encoder().to(DEVICE)
    embedded, positions = [], []
    for _ in range(ENCODED):
        tokens = torch.randint(0, 151_936, (1, PROMPT_TOKENS)).to(DEVICE)
        mask = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64).to(DEVICE)
        output = encoder(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
        stacked = torch.stack([output.hidden_states[layer] for layer in PROMPT_LAYERS], dim=1)
        prompt = stacked.permute(0, 2, 1, 3).reshape(1, PROMPT_TOKENS, -1).repeat(1, 1, 1)
        ids = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(PROMPT_TOKENS))
        embedded.append(prompt)
        positions.append(ids[None].to(DEVICE))
    embedded += [embedded[0].clone() for _ in range(IMAGES - ENCODED)]
    positions += [positions[0].clone() for _ in range(IMAGES - ENCODED)]
    encoder.to("cpu")
    return torch.cat(embedded).to(DEVICE), torch.cat(positions).to(DEVICE)


@torch.no_grad()
def encode_images(images: list[torch.Tensor]) -> torch.Tensor:
    """Returns latents [image, channel, y, x]: 128 channels, a sixteenth of each side."""
    autoencoder = make_autoencoder()
    mean = autoencoder.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(autoencoder.bn.running_var.view(1, -1, 1, 1) + autoencoder.config.batch_norm_eps)
    autoencoder.to(DEVICE)
    mean, deviation = mean.to(DEVICE), deviation.to(DEVICE)
    latents = []
    for start in range(0, len(images), 2):
        pixels = torch.stack(images[start : start + 2]).to(device=DEVICE, dtype=torch.bfloat16)
        encoded = autoencoder.encode(pixels).latent_dist.mode()
        count, channels, height, width = encoded.shape
        patches = encoded.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        patches = patches.reshape(count, channels * 4, height // 2, width // 2)
        latents.append(((patches - mean) / deviation).to(DEVICE))
    autoencoder.to("cpu")
    return torch.cat(latents)


def image_positions(latents: torch.Tensor) -> torch.Tensor:
    """Returns the positions of the latents' tokens [image, token, 4], on the CPU."""
    count, _, height, width = latents.shape
    one = torch.arange(1)
    return torch.cartesian_prod(one, torch.arange(height), torch.arange(width), one)[None].expand(count, -1, -1)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Returns latents [image, channel, y, x] as tokens [image, token, channel]."""
    return latents.flatten(2).permute(0, 2, 1)


def unpack(tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Returns tokens [image, token, channel] in the places [image, token, 4] of an image [image, channel, y, x]."""
    images = []
    for one, place in zip(tokens, positions, strict=True):
        flat = place[:, 1].to(torch.int64) * width + place[:, 2].to(torch.int64)
        grid = torch.zeros((width * width, one.shape[1]), device=one.device, dtype=one.dtype)
        grid.scatter_(0, flat.unsqueeze(1).expand(-1, one.shape[1]), one)
        images.append(grid.view(width, width, one.shape[1]).permute(2, 0, 1))
    return torch.stack(images)


if __name__ == "__main__":
    main(sys.argv[1])
