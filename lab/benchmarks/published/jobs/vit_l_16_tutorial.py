"""Trains ViT-L/16 on one image with Adam, as PyTorch's tutorial does before it fuses the optimizer."""

import torch
from families.setting import DEVICE, STEPS
from families.vit_l_16 import make_model, tutorial_step


def main() -> None:
    """Gradients are freed after the optimizer's step."""
    model = make_model().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        tutorial_step(model)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
