"""Cross-entropy and its gradient, a few rows at a time, from whole logits or straight from the layer before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


def exact(dtype: torch.dtype) -> torch.dtype:
    """Returns the accumulation type for a type."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True)
class Terms:
    """The arguments of a cross-entropy call.

    Attributes:
        original: torch's own function.
        rows: Rows computed at a time.
        ignore_index: Class index that is ignored.
        reduction: mean, sum or none.
        label_smoothing: Share of each target spread over all classes.
    """

    original: Callable[..., Tensor]
    rows: int
    ignore_index: int
    reduction: str
    label_smoothing: float

    def parts(self, count: int) -> Iterator[slice]:
        """Yields the chunks of rows."""
        for start in range(0, count, self.rows):
            yield slice(start, min(start + self.rows, count))

    def loss(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the loss of one chunk, summed, or of each row where nothing is reduced."""
        return self.original(
            logits,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction="none" if self.reduction == "none" else "sum",
            label_smoothing=self.label_smoothing,
        )

    def whole(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the loss of all rows at once, as torch computes it."""
        return self.original(
            logits,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def divisor(self, target: Tensor, weight: Tensor | None, samples: int) -> Tensor | float:
        """Returns the divisor of the summed loss: the weights of the counted targets, or the number of samples."""
        if self.reduction != "mean":
            return 1.0
        if target.is_floating_point():
            return float(samples)
        counts = target != self.ignore_index
        if weight is None:
            return counts.sum()
        return weight[target[counts]].sum()

    def reduce(self, parts: list[Tensor], divisor: Tensor | float) -> Tensor:
        """Combines the chunks' losses."""
        if self.reduction == "none":
            return torch.cat(parts)
        total = torch.stack(parts)
        loss = total.sum(dtype=exact(total.dtype)) / divisor
        return loss.to(total.dtype)

    def into_gradient(self, work: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor) -> None:
        """Converts a chunk's softmax to the gradient of its logits, in place.

        The loss of a row is minus the sum of ``share * log_softmax`` over the classes, so its gradient is
        ``softmax * sum(share) - share``: no other tensor of the size of the chunk is needed.

        Args:
            work: Softmax over dimension 1, shape ``(rows, classes, ...)``.
            target: Class indices, shape ``(rows, ...)``, or probabilities of ``work``'s shape.
            weight: Weight of each class.
            scale: Factor of each row's gradient: one for all, or shape ``(rows, ...)``.
        """
        classes, smoothing = work.shape[1], self.label_smoothing
        along = (1, classes, *[1] * (work.dim() - 2))
        factor = scale if scale.dim() == 0 else scale.unsqueeze(1)
        if target.is_floating_point():
            share = target.to(work.dtype) * (1 - smoothing) + smoothing / classes
            if weight is not None:
                share *= weight.view(along)
            work.mul_(share.sum(1, keepdim=True)).sub_(share).mul_(factor)
            return
        counts = (target != self.ignore_index).unsqueeze(1)
        index = torch.where(counts, target.unsqueeze(1), 0)
        kept = counts * factor.to(work.dtype)
        share = kept if weight is None else kept * weight[index]
        if not smoothing:
            work.mul_(share).scatter_add_(1, index, -share)
            return
        spread = kept * (smoothing / classes)
        whole = classes if weight is None else weight.sum()
        work.mul_(share * (1 - smoothing) + spread * whole).scatter_add_(1, index, share * (smoothing - 1))
        work.sub_(spread if weight is None else spread * weight.view(along))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of existing logits: keeps the logits, but never a whole softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, terms: Terms) -> Tensor:
        """Returns the loss."""
        parts = [terms.loss(logits[part], target[part], weight) for part in terms.parts(len(logits))]
        divisor = terms.divisor(target, weight, logits.numel() // logits.shape[1])
        ctx.terms, ctx.divisor = terms, divisor
        ctx.save_for_backward(logits, target, weight)
        return terms.reduce(parts, divisor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the logits, the only whole tensor allocated."""
        logits, target, weight = ctx.saved_tensors
        terms: Terms = ctx.terms
        if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated, too
            (gradient,) = torch.autograd.grad(terms.whole(logits, target, weight), logits, upstream, create_graph=True)
            return gradient, None, None, None
        gradient = torch.empty_like(logits)
        scale = upstream / ctx.divisor
        for part in terms.parts(len(logits)):
            own = scale if scale.dim() == 0 else scale[part]
            if exact(logits.dtype) is not logits.dtype:
                work = torch.softmax(logits[part], 1, dtype=exact(logits.dtype))
                terms.into_gradient(work, target[part], weight, own)
                gradient[part] = work
                del work
            else:
                work = torch.softmax(logits[part], 1, out=gradient[part])
                terms.into_gradient(work, target[part], weight, own)
        return gradient, None, None, None


class ChunkedHead(torch.autograd.Function):
    """Cross-entropy from the input of the Linear that computes the logits, which never exist as a whole.

    Backward recomputes each chunk's logits: a third more of the layer's cost, and nothing is kept.

    Source: the idea of never computing the whole logits is from Wijmans et al., "Cut Your Losses in Large-Vocabulary
    Language Models", 2024; here with plain matrix products on chunks of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        terms: Terms,
        make: Callable[..., Tensor],
    ) -> Tensor:
        """Returns the loss; ``make`` computes logits from rows, casts included."""
        parts = [
            terms.loss(make(hidden[part], matrix, bias), target[part], weight) for part in terms.parts(len(hidden))
        ]
        divisor = terms.divisor(target, weight, len(hidden))
        ctx.terms, ctx.divisor, ctx.make = terms, divisor, make
        ctx.save_for_backward(hidden, matrix, bias, target, weight)
        return terms.reduce(parts, divisor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the layer's input, its matrix and its bias."""
        hidden, matrix, bias, target, weight = ctx.saved_tensors
        terms: Terms = ctx.terms
        needs_hidden, needs_matrix, needs_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated, too
            loss = terms.whole(ctx.make(hidden, matrix, bias), target, weight)
            wanted = [each for each, needs in zip((hidden, matrix, bias), ctx.needs_input_grad, strict=False) if needs]
            found = iter(torch.autograd.grad(loss, wanted, upstream, create_graph=True))
            return (*(next(found) if needs else None for needs in ctx.needs_input_grad[:3]), *(None,) * 4)
        # Sums over chunks use at least 32 bits, as one matrix product would.
        wide = exact(hidden.dtype)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_matrix = torch.zeros_like(matrix, dtype=wide) if needs_matrix else None
        of_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        scale = upstream / ctx.divisor
        for part in terms.parts(len(hidden)):
            logits = ctx.make(hidden[part], matrix, bias)
            work = torch.softmax(logits, 1, dtype=exact(logits.dtype))
            del logits
            terms.into_gradient(work, target[part], weight, scale if scale.dim() == 0 else scale[part])
            work = work.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(work, matrix, out=of_hidden[part])
            if of_matrix is not None and of_matrix.dtype is work.dtype:
                of_matrix.addmm_(work.t(), hidden[part])
            elif of_matrix is not None:
                of_matrix += work.t() @ hidden[part]
            if of_bias is not None:
                of_bias += work.sum(0, dtype=wide)
            del work
        return (
            of_hidden,
            None if of_matrix is None else of_matrix.to(matrix.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 4,
        )
