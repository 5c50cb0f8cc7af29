"""Attention without a model: its score matrices, forward and backward."""

import torch

QUERIES, WIDTH, BATCH = 4096, 16, 8

history = torch.cuda.memory
history._record_memory_history(max_entries=100_000)
query, key, value = (torch.randn(BATCH, QUERIES, WIDTH, device="cuda", requires_grad=True) for _ in range(3))


def normalize(scores: torch.Tensor) -> torch.Tensor:
    """Softmax, written out."""
    largest = scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(scores - largest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


def attend() -> torch.Tensor:
    """Returns what the queries find."""
    scores = torch.einsum("bqd,bkd->bqk", query, key)
    scores = scores / WIDTH**0.5
    weights = normalize(scores)
    return torch.einsum("bqk,bkd->bqd", weights, value)


found = attend()
found.sum().backward()
history._dump_snapshot("gpu.pickle")
