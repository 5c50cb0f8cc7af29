"""A small vision transformer made of torch's own encoder layers, keyword arguments included."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, PATCH, WIDTH, LAYERS, CLASSES, BATCH = 32, 4, 64, 4, 10, 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(src=x, src_mask=None)
        return {"tokens": self.norm(x)}


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2, WIDTH))
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.encoder(x)["tokens"].mean(1))


def make_model():
    return ViT()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_loader():
    images, labels = torch.randn(BATCH * 8, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH * 8,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
