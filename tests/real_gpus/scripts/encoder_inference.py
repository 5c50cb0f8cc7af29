"""Inference of torch's own attention layers under no_grad, from the model's creation on."""

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH, HIDDEN, LAYERS, HEADS, BATCH = 50_000, 128, 768, 3072, 12, 12, 32


class Layer(nn.Module):
    """Attention and perceptron, each added and then normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.first = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.second = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.first(x + attended)
        changed = self.perceptron(x)
        return self.second(x + changed)


class Encoder(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        scores = self.head(x)
        return scores


words, targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda") for _ in range(2))
torch.cuda.memory._record_memory_history()


def infer(model: nn.Module) -> None:
    """Runs the model 25 times, of which the last scores stay."""
    for _ in range(25):
        with torch.no_grad():
            scores = model(words)
            loss = nn.functional.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))  # noqa: F841


model = Encoder().to("cuda")
infer(model)
torch.cuda.memory._dump_snapshot("gpu.pickle")
