"""Sparse embeddings with SparseAdam, the dense part with Adam: two optimizers in one loop."""

import torch
from torch import nn


class BagOfWords(nn.Module):
    def __init__(self, vocabulary=400, width=32):
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, width, mode="mean", sparse=True)
        self.topic = nn.Embedding(20, width, sparse=True)
        self.out = nn.Linear(width, 2)

    def forward(self, words, offsets, topic):
        return self.out(torch.relu(self.words(words, offsets) + self.topic(topic)))


torch.manual_seed(29)
model = BagOfWords()
sparse = [*model.words.parameters(), *model.topic.parameters()]
sparse_optimizer = torch.optim.SparseAdam(sparse, lr=1e-2)
dense_optimizer = torch.optim.Adam(model.out.parameters(), lr=1e-2)
for step in range(10):
    words = torch.randint(400, (160,))
    offsets = torch.arange(0, 160, 10)
    topic = torch.randint(20, (16,))
    loss = nn.functional.cross_entropy(model(words, offsets, topic), (words[::10] > 200).long())
    for optimizer in (sparse_optimizer, dense_optimizer):
        optimizer.zero_grad()
    loss.backward()
    for optimizer in (sparse_optimizer, dense_optimizer):
        optimizer.step()
    print(step, repr(loss.item()))
