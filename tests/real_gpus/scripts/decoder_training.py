"""Forward and backward of a decoder in float32, without an optimizer."""

import torch
from decoder import Decoder
from decoder_loss import cross_entropy

model = Decoder(words=10_000, length=256, width=768, hidden=3072, layers=12, heads=12).to("cuda")
words, targets = (torch.randint(0, 10_000, (32, 256)).to("cuda") for _ in range(2))
for step in range(6):
    if step == 5:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    scores = model(words)
    loss = cross_entropy(scores, targets)
    loss.backward()
torch.cuda.memory._dump_snapshot("gpu.pickle")
