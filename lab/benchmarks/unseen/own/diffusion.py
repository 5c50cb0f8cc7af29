"""Denoising diffusion with lucidrains' U-Net: accumulation, clipping, a moving average, sampling.

Written for this table.
"""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from ema_pytorch import EMA


def main() -> None:
    """Trains on random images."""
    torch.manual_seed(0)
    diffusion = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2)), image_size=16, timesteps=10)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-4, betas=(0.9, 0.99))
    average = EMA(diffusion, beta=0.99, update_every=2)
    for step in range(8):
        total = 0.0
        for _ in range(2):
            loss = diffusion(torch.rand(4, 3, 16, 16)) / 2
            total += loss.item()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        print(f"step {step} loss {total:.6f}")
    print(f"sampled {average.ema_model.sample(batch_size=1).sum().item():.4f}")


if __name__ == "__main__":
    main()
