"""A model's parameters on one rank, and their weights, gradients and optimizer state: what ZeRO shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memprof.analysis.estimate.terms import Setting, Term

_ZERO = "Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 5"
#: 8-bit state: tensors that are small, or not a whole number of blocks, keep 32 bits; each block has a 4-byte scale,
#: each state a table of 256 scales (torchao and bitsandbytes alike).
_EIGHT_BIT_FROM, _BLOCK, _TABLE_BYTES = 4096, 256, 1024
_SOURCES = {
    "momentum": "Sutskever et al. 2013; torch.optim.SGD: one buffer per parameter",
    "adam": "Kingma and Ba 2015, Adam, algorithm 1: two moments; torch counts each tensor's updates in 4 bytes",
    "adam8bit": "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, section 2; blocks of 256",
    "adafactor": "Shazeer and Stern 2018, Adafactor, section 3: a row and a column for each matrix",
}
_SOURCES["adamw"] = _SOURCES["adam"]


def state_terms(parameters: Sequence[Parameter], setting: Setting) -> tuple[Term, ...]:
    """Returns the terms of weights, gradients and optimizer state on one rank."""
    mine = [one.on_rank(setting.tensor_ranks) for one in parameters]
    return (*_weights(mine, setting), *_gradients(mine, setting), *_optimizer(mine, setting))


def _weights(mine: Sequence[Parameter], setting: Setting) -> list[Term]:
    precision = setting.precision
    return [
        Term(
            "weights",
            "weights",
            _shared(precision.weights * count(mine), setting, stage=3),
            f"{precision.weights} P{_over(setting, 3)}",
            _also(precision.source, setting, 3),
            "weights are frozen and quantized, or kept in more than one copy",
        )
    ]


def _gradients(mine: Sequence[Parameter], setting: Setting) -> list[Term]:
    precision = setting.precision
    return [
        Term(
            "gradients",
            "gradients",
            _shared(precision.gradients * count(mine), setting, stage=2),
            f"{precision.gradients} P{_over(setting, 2)}",
            _also(precision.source, setting, 2),
            "gradients are accumulated in fp32 with 16-bit weights (4 P), or freed during backward",
        )
    ]


def _optimizer(mine: Sequence[Parameter], setting: Setting) -> list[Term]:
    precision, elements = setting.precision, count(mine)
    over, made = _over(setting, 1), []
    if precision.master:
        made.append(
            Term(
                "optimizer",
                "weights in fp32",
                _shared(precision.master * elements, setting, stage=1),
                f"{precision.master} P{over}",
                _also(precision.source, setting, 1),
                "the weights themselves are in fp32 (torch.amp: --precision bf16-autocast)",
            )
        )
    if setting.optimizer == "sgd":
        return made
    size, formula, name = _state(mine, setting)
    made.append(
        Term(
            "optimizer",
            name,
            _shared(size, setting, stage=1),
            f"{formula}{over}",
            _also(_SOURCES[setting.optimizer], setting, 1),
            "before the first update, or with options that add state (amsgrad: half as much again)",
        )
    )
    return made


def _state(mine: Sequence[Parameter], setting: Setting) -> tuple[int, str, str]:
    """Returns the bytes of the optimizer state, its formula and its name."""
    width, elements = setting.precision.states, count(mine)
    tensors = sum(one.times for one in mine)
    if setting.optimizer == "momentum":
        return width * elements, f"{width} P", "momentum"
    if setting.optimizer in ("adam", "adamw"):
        return 2 * width * elements + 4 * tensors, f"({2 * width} P + 4 tensors)", "two moments"
    if setting.optimizer == "adam8bit":
        size = sum(one.times * _eight_bit_bytes(math.prod(one.shape), 4) for one in mine)
        return 2 * size + 4 * tensors, "2 (P + 4 P/256)", "two moments in 8 bits"
    size = sum(one.times * _factored_bytes(one.shape, width) for one in mine)
    return size + 4 * tensors, f"{width} (rows + columns)", "factored second moment"


def _eight_bit_bytes(elements: int, width: int) -> int:
    """Returns the bytes of one moment of one tensor: codes, scales and the table, or unquantized."""
    if elements < _EIGHT_BIT_FROM or elements % _BLOCK:
        return width * elements
    return elements + 4 * (elements // _BLOCK) + _TABLE_BYTES


def _factored_bytes(shape: tuple[int, ...], width: int) -> int:
    """Returns the bytes of Adafactor's state of one tensor: row and column means, or all elements of a vector."""
    if len(shape) < 2:
        return width * math.prod(shape)
    *others, rows, columns = shape
    return width * math.prod(others) * (rows + columns)


def _shared(size: int, setting: Setting, stage: int) -> int:
    """Divides by the number of ranks where the ZeRO stage shards it."""
    return -(-size // setting.ranks) if setting.zero >= stage else size


def _over(setting: Setting, stage: int) -> str:
    return "/N" if setting.zero >= stage else ""


def _also(source: str, setting: Setting, stage: int) -> str:
    return f"{source}; {_ZERO}" if setting.zero >= stage else source


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
        """Returns one rank's part under tensor parallelism; a size that does not divide evenly is padded."""
        if not self.is_split or tensor_ranks == 1:
            return self
        part = -(-self.shape[0] // tensor_ranks)
        return Parameter(self.name, (part, *self.shape[1:]), self.times, self.layer, self.is_product, is_split=True)


def count(parameters: Iterable[Parameter]) -> int:
    """Returns the number of elements in the parameters."""
    return sum(one.elements for one in parameters)
