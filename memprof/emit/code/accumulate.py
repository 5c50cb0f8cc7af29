"""Micro-batches: splits a batch, and weights each part by its share of the samples."""

from __future__ import annotations

from memprof.emit.code.pieces import Code

_MICRO_BATCHES = '''
def micro_batches(batch, count={count}):
    """Yields the parts of tensors in tuples, lists and dicts, and each part's share of the samples."""
    size = next(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    count = min(count, size)
    edges = [number * (size // count) + min(number, size % count) for number in range(count + 1)]
    for first, last in pairwise(edges):

        def take(leaf, rows=slice(first, last)):
            is_split = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
            return leaf[rows] if is_split else leaf

        yield tree_map(take, batch), (last - first) / size
'''


def accumulate_code(count: int) -> Code:
    """Returns the code that splits batches into ``count`` parts."""
    return Code(
        imports=(
            "import torch",
            "from itertools import pairwise",
            "from torch.utils._pytree import tree_leaves, tree_map",
        ),
        helpers=(_MICRO_BATCHES.format(count=count),),
        notes=(
            (
                "accumulate: split the batch in your loop, as shown at the top; gradients are those of the whole "
                "batch if the loss is a mean over its samples."
            ),
        ),
    )
