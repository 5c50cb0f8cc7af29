"""Bidirectional LSTM over packed sequences of varying length; labels are returned in a dataclass with the loss."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.out = nn.Linear(32, 4)

    def forward(self, ids, lengths, labels):
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        logits = self.out(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Output(loss=loss, logits=logits)


torch.manual_seed(32)
model = Tagger()
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
for step in range(10):
    lengths = torch.randint(3, 18, (12,))
    longest = int(lengths.max())
    inside = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(1, 50, (12, longest)) * inside
    labels = (ids % 4).masked_fill(~inside, -100)
    output = model(ids=ids, lengths=lengths, labels=labels)
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    print(step, longest, repr(output.loss.item()))
