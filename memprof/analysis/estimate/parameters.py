"""A model's parameters by shape: how many numbers there are, and how many of them a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """Parameters of one shape.

    Attributes:
        name: What it is, a few words.
        shape: Sizes of one.
        times: How many of them the model has, over all layers.
        layer: Whether the model's repeated layers own it; what is not belongs to the model's ends.
        is_product: Whether it is the weight of a matrix product or convolution.
        is_split: Whether tensor parallelism divides it over its ranks.
    """

    name: str
    shape: tuple[int, ...]
    times: int = 1
    layer: bool = False
    is_product: bool = False
    is_split: bool = False

    @property
    def elements(self) -> int:
        """Numbers in all of them together."""
        return self.times * math.prod(self.shape)

    def on_rank(self, tensor_ranks: int) -> Parameter:
        """Returns the part of it that one rank holds under tensor parallelism; what does not divide is padded.

        Args:
            tensor_ranks: Ranks that divide each layer.
        """
        if not self.is_split or tensor_ranks == 1:
            return self
        part = -(-self.shape[0] // tensor_ranks)
        return Parameter(self.name, (part, *self.shape[1:]), self.times, self.layer, self.is_product, is_split=True)


def count(parameters: Iterable[Parameter]) -> int:
    """Returns how many numbers parameters hold."""
    return sum(one.elements for one in parameters)
