"""Forward and backward of a decoder in float32, without an optimizer."""

import torch
from decoder import Decoder


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Written out as well."""
    largest = torch.max(scores, dim=-1, keepdim=True)[0]
    scores = scores - largest
    return scores - torch.log(torch.sum(torch.exp(scores), dim=-1, keepdim=True))


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all words."""
    wrong = -log_softmax(scores)
    return torch.mean(torch.gather(wrong, -1, targets.unsqueeze(-1)))


model = Decoder(words=10_000, length=256, width=768, hidden=3072, layers=12, heads=12).to("cuda")
words, targets = (torch.randint(0, 10_000, (32, 256)).to("cuda") for _ in range(2))
for step in range(6):
    if step == 5:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    scores = model(words)
    loss = cross_entropy(scores, targets)
    loss.backward()
torch.cuda.memory._dump_snapshot("gpu.pickle")
