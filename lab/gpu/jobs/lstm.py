"""A word language model: an embedding, several LSTM layers, dropout between them."""

from __future__ import annotations

import training
from torch import nn

SIZES = {
    "tiny": {"layers": 2, "width": 48, "length": 16, "vocabulary": 200, "batch": 4},
    "base": {"layers": 3, "width": 1024, "length": 128, "vocabulary": 20000, "batch": 64},
}


class Words(nn.Module):
    def __init__(self, layers, width, length, vocabulary, batch):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.predict = nn.Linear(width, vocabulary)

    def forward(self, ids):
        hidden = self.dropout(self.embed(ids))
        for layer in self.layers:
            hidden, _ = layer(hidden)
            hidden = self.dropout(hidden)
        return self.predict(hidden)


if __name__ == "__main__":
    training.run(__doc__, SIZES, Words, training.make_words)
