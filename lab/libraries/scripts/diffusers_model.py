"""diffusers: noise prediction by a U-Net or a DiT; with `resident`, VAE and text encoder encode every batch.

unet|dit [resident]
"""

import sys

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
kind, is_resident = sys.argv[1], "resident" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64
if kind == "unet":
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )
else:
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=3, sample_size=16
    )
model.to(device).train()
if is_resident:
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            eos_token_id=2,
        )
    )
    for frozen in (vae, text):
        frozen.to(device).requires_grad_(False).eval()
scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rate = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
for step in range(8):
    if is_resident:
        images, ids = torch.randn(8, 3, 32, 32).to(device), torch.randint(3, 256, (8, 16)).to(device)
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.sample() * vae.config.scaling_factor
            states = text(ids)[0]
    else:
        latents, states = torch.randn(8, 4, 16, 16).to(device), torch.randn(8, 16, WIDTH).to(device)
    noise = torch.randn_like(latents)
    times = torch.randint(0, 1000, (8,), device=device).long()
    noisy = scheduler.add_noise(latents, noise, times)
    if kind == "unet":
        predicted = model(noisy, times, states).sample
    else:
        predicted = model(noisy, times, class_labels=torch.randint(0, 10, (8,), device=device)).sample
    loss = functional.mse_loss(predicted.float(), noise.float())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
    optimizer.zero_grad()
    print(step, loss.item())
