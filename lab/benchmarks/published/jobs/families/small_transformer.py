"""The transformer of PyTorch's test of checkpointing by integer programming: 4 layers of 768, Adam."""

import torch
import torch.nn.functional as F
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, DROPOUT, BATCH = 8192, 1024, 768, 12, 4, 0.1, 8
# Embedding (its weight is the head's too) and positions 7,077,888, 4 layers of 7,084,800, 1,536 of the last norm.
PARAMETERS = 35_418_624


class Attention(nn.Module):
    """Four linears without bias around scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries = queries.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        keys = keys.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        values = values.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        output = F.scaled_dot_product_attention(queries, keys, values, dropout_p=DROPOUT, is_causal=True)
        output = output.transpose(1, 2).reshape(*x.shape)
        return self.dropout(self.output(output))


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = x + self.attention(self.attention_norm(x))
        return attended + self.feed_forward(self.feed_forward_norm(attended))


class Transformer(nn.Module):
    """Embeddings, layers, a norm, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        places = torch.arange(0, tokens.shape[1], device=tokens.device)
        positions = self.positions(places)
        hidden = hidden + positions
        hidden = self.dropout(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden).float()


def train() -> None:
    """The loss is the sum of the logits, which stay alive until the next forward has made new ones."""
    with DEVICE:
        model = Transformer()
    expect_parameters(model, PARAMETERS)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)
    for _ in range(STEPS):
        output = model(tokens)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
