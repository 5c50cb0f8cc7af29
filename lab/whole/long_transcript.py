"""icefall#521: a transducer's joiner has frames x tokens x vocabulary; one long transcript makes the highest step."""

import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder, joiner = nn.Linear(80, 64), nn.Embedding(256, 64), nn.Linear(64, 256)
model = nn.ModuleList([encoder, decoder, joiner])
optimizer = torch.optim.Adam(model.parameters())
tokens = [12 + place * 7 % 9 for place in range(40)]
tokens[27] = 90
for count in tokens:
    frames, text = encoder(torch.randn(4, 50, 80)), decoder(torch.randint(256, (4, count)))
    joiner(torch.tanh(frames[:, :, None] + text[:, None])).log_softmax(-1).mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad()
