"""Language model with carried state and a hand-written SGD update, after the structure of the example."""

import math

import torch
import torch.nn as nn

BATCH, LENGTH, VOCABULARY, LR, CLIP = 10, 15, 60, 5.0, 0.25


class RNNModel(nn.Module):
    def __init__(self, width, layers, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, VOCABULARY)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(self.rnn.num_layers, size, self.rnn.hidden_size)


def batchify(data, size):
    count = data.size(0) // size
    return data.narrow(0, 0, count * size).view(size, -1).t().contiguous()


def get_batch(source, i):
    length = min(LENGTH, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


torch.manual_seed(31)
steps = torch.randint(1, 4, (BATCH * 150,)).cumsum(0) % VOCABULARY
train_data, val_data = batchify(steps[: BATCH * 120], BATCH), batchify(steps[BATCH * 120 :], BATCH)
model = RNNModel(40, 2, 0.2)
criterion = nn.NLLLoss()


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(BATCH)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, LENGTH):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train(epoch):
    model.train()
    hidden = model.init_hidden(BATCH)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, LENGTH)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = hidden.detach()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-LR)
        print(f"| epoch {epoch} | {batch} batches | loss {loss.item()!r} | ppl {math.exp(loss.item())!r}")


for epoch in range(1, 3):
    train(epoch)
    print(f"| end of epoch {epoch} | valid loss {evaluate(val_data)!r}")
