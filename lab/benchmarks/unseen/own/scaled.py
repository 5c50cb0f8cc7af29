"""Autocast with a gradient scaler, loader workers, and batches of validation four times larger.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 32, 32, generator=generator), index % 10


def main() -> None:
    """Trains in bfloat16 and validates in float32."""
    torch.manual_seed(0)
    blocks = []
    for before, width in ((3, 16), (16, 32), (32, 32)):
        blocks.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    training = DataLoader(Images(96), batch_size=8, num_workers=2, shuffle=True)
    validation = DataLoader(Images(64), batch_size=32, num_workers=1)
    for epoch in range(2):
        model.train()
        for images, labels in training:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"epoch {epoch} loss {loss.item():.6f}")
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(images), labels) for images, labels in validation]
        print(f"epoch {epoch} validation {torch.stack(losses).mean().item():.6f}")


if __name__ == "__main__":
    main()
