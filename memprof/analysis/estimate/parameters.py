"""A model's parameters by shape: how many elements, and how many of them on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """Parameters of one shape.

    Attributes:
        name: Its name, a few words.
        shape: Shape of one.
        times: How many the model has, over all layers.
        layer: Whether it belongs to the repeated layers; otherwise it belongs to the model's ends.
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
        """Total number of elements."""
        return self.times * math.prod(self.shape)

    def on_rank(self, tensor_ranks: int) -> Parameter:
        """Returns one rank's part under tensor parallelism; a size that does not divide evenly is padded.

        Args:
            tensor_ranks: Ranks that divide each layer.
        """
        if not self.is_split or tensor_ranks == 1:
            return self
        part = -(-self.shape[0] // tensor_ranks)
        return Parameter(self.name, (part, *self.shape[1:]), self.times, self.layer, self.is_product, is_split=True)


def count(parameters: Iterable[Parameter]) -> int:
    """Returns the number of elements in the parameters."""
    return sum(one.elements for one in parameters)
