"""Fine-tunes a decoder by low-rank updates of frozen weights, for the gallery."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 128_000, 2048, 8, 2048, 2
DEVICE = "cuda"


class Adapted(nn.Linear):
    """A frozen Linear with a low-rank update."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        """Creates the update, which is zero at first."""
        super().__init__(inputs, outputs, bias=False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the update."""
        out: Tensor = super().forward(x) + self.up(self.down(x))
        return out


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        """Creates both."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, WIDTH)
        self.mlp = nn.Sequential(Adapted(WIDTH, 4 * WIDTH), nn.GELU(), Adapted(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def main() -> None:
    """Trains three steps."""
    parts = {
        "embed": nn.Embedding(VOCABULARY, WIDTH),
        "layers": nn.Sequential(*(Layer() for _ in range(LAYERS))),
        "norm": nn.LayerNorm(WIDTH),
        "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
    }
    model = nn.Sequential(OrderedDict(parts)).to(DEVICE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".down." in name or ".up." in name
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
