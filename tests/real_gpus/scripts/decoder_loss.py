"""The loss of the decoder, written out."""

import torch


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Written out as well."""
    largest = torch.max(scores, dim=-1, keepdim=True)[0]
    scores = scores - largest
    return scores - torch.log(torch.sum(torch.exp(scores), dim=-1, keepdim=True))


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all words."""
    wrong = -log_softmax(scores)
    return torch.mean(torch.gather(wrong, -1, targets.unsqueeze(-1)))
