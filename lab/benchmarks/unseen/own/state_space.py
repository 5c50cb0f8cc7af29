"""A selective state-space model in plain torch: a scan over time, gates, a tied head.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, STATE, WORDS = 48, 96, 8, 128


class Mixer(nn.Module):
    """Mixes along time by a scan whose parameters depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.entry, self.exit = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.convolution = nn.Conv1d(INNER, INNER, 4, padding=3, groups=INNER)
        self.selection, self.step = nn.Linear(INNER, 2 * STATE + 4), nn.Linear(4, INNER)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, STATE + 1)).repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values, gate = self.entry(self.norm(tokens)).chunk(2, -1)
        values = F.silu(self.convolution(values.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
        low, entering, leaving = self.selection(values).split((4, STATE, STATE), -1)
        step = F.softplus(self.step(low))
        kept = torch.exp(step[..., None] * -torch.exp(self.decay))
        added = (step * values)[..., None] * entering[:, :, None]
        state, outputs = torch.zeros_like(kept[:, 0]), []
        for time in range(tokens.shape[1]):
            state = kept[:, time] * state + added[:, time]
            outputs.append((state * leaving[:, time, None]).sum(-1))
        mixed = torch.stack(outputs, 1) + self.skip * values
        return tokens + self.exit(mixed * F.silu(gate))


class Model(nn.Module):
    """Words in, the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(words)
        for layer in self.layers:
            tokens = layer(tokens)
        return F.linear(self.norm(tokens), self.embedding.weight)


def main() -> None:
    """Trains on random words."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(9):
        words = torch.randint(0, WORDS, (4, 25))
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
