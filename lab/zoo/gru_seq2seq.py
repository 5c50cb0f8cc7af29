"""GRU encoder and decoder with teacher forcing, learning to reverse number sequences."""

import random

import torch
from torch import nn

VOCABULARY, LENGTH, START = 20, 12, 0


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        return self.gru(self.embedding(ids))


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRUCell(2 * width, width)
        self.attend = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, token, hidden, memory):
        scores = torch.bmm(memory, self.attend(hidden).unsqueeze(2)).softmax(1)
        context = (scores * memory).sum(1)
        hidden = self.cell(torch.cat([self.embedding(token), context], 1), hidden)
        return self.out(hidden), hidden


class Seq2Seq(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = Encoder(width)
        self.decoder = Decoder(width)

    def forward(self, source, target, teacher_forcing=0.5):
        memory, hidden = self.encoder(source)
        hidden = hidden[0]
        token = torch.full((source.shape[0],), START)
        outputs = []
        for position in range(target.shape[1]):
            logits, hidden = self.decoder(token, hidden, memory)
            outputs.append(logits)
            token = target[:, position] if random.random() < teacher_forcing else logits.argmax(1)
        return torch.stack(outputs, 1)


random.seed(1)
torch.manual_seed(1)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for iteration in range(10):
    source = torch.randint(1, VOCABULARY, (32, LENGTH))
    target = source.flip(1)
    optimizer.zero_grad()
    output = model(source, target)
    loss = criterion(output.reshape(-1, VOCABULARY), target.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(iteration, repr(loss.item()))
