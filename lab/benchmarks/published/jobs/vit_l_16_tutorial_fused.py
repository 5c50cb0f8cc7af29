"""Trains ViT-L/16 on one image with an Adam for each parameter, stepped in the backward, as PyTorch's tutorial."""

import torch
from families.setting import DEVICE, STEPS
from families.vit_l_16 import make_model, tutorial_step


def main() -> None:
    """Each gradient is used and freed as soon as it is whole."""
    model = make_model().to(DEVICE)
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        tutorial_step(model)


if __name__ == "__main__":
    main()
