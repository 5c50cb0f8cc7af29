"""A vision transformer with stochastic depth, mixup, warm-up and clipping.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, PATCH, CLASSES = 64, 4, 10


class Block(nn.Module):
    """Attention and a perceptron; either may be left out in training."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = drop

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        return values * torch.bernoulli(values.new_full((len(values), 1, 1), 1 - self.drop)) / (1 - self.drop)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(tokens)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.keep(self.projection(mixed))
        return tokens + self.keep(self.mlp(self.norm2(tokens)))


class Transformer(nn.Module):
    """Patches, a class token, blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 65, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(0.1 * number / depth) for number in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


def main() -> None:
    """Trains on random images."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    data = torch.utils.data.TensorDataset(torch.rand(160, 3, 32, 32), torch.randint(0, CLASSES, (160,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    for step, (images, labels) in enumerate(loader):
        share, order = torch.distributions.Beta(0.8, 0.8).sample(), torch.randperm(len(images))
        targets = F.one_hot(labels, CLASSES).float()
        mixed = share * images + (1 - share) * images[order]
        loss = F.cross_entropy(model(mixed), share * targets + (1 - share) * targets[order])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
