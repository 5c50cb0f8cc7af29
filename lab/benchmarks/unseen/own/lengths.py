"""Text classification on packed sequences of all lengths, sorted into buckets.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class Reader(nn.Module):
    """An embedding, a bidirectional LSTM over packed sequences, attention over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, bidirectional=True, batch_first=True)
        self.score, self.output = nn.Linear(128, 1), nn.Linear(128, 4)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.score(torch.tanh(hidden)).masked_fill((words == 0)[..., None], float("-inf"))
        return self.output((scores.softmax(1) * hidden).sum(1))


def batch_of(texts: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads texts to the longest of them."""
    words = pad_sequence([text for text, _ in texts], batch_first=True)
    return words, torch.tensor([len(text) for text, _ in texts]), torch.tensor([label for _, label in texts])


def main() -> None:
    """Trains on random words."""
    torch.manual_seed(0)
    lengths = torch.randint(8, 60, (144,)).tolist()
    texts = [(torch.randint(1, 2000, (length,)), length % 4) for length in lengths]
    loader = torch.utils.data.DataLoader(texts, batch_size=12, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, (words, sizes, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words, sizes), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
