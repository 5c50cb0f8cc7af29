"""Parses the command-line notation for a network of convolutions and linear layers.

``3x32x32,16k3p1,bn,relu,[16k3p1,bn,relu,16k3p1,bn],relu,avgpool,dropout,linear10``: the size of a sample, then layers;
``[path|path]`` is the sum of two paths (the second is the input itself where it is left out), ``(layers)x3`` repeats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.errors import UsageError

_CONVOLUTION = re.compile(r"(?P<channels>[0-9]{1,9})k(?P<kernel>[0-9]{1,9})(?P<options>([spgb][0-9]{1,9})*)")
_POOL = re.compile(r"(?P<kind>maxpool|avgpool)(?P<kernel>[0-9]{1,9})(?P<options>([sp][0-9]{1,9})*)")
_LINEAR = re.compile(r"linear(?P<width>[0-9]{1,9})(?P<options>(b[01])?)")
_SIMPLE = ("bn", "relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "avgpool", "flatten")
_REPEAT = re.compile(r"x([0-9]{1,6})")
_MOST_LAYERS, _DEEPEST = 100_000, 50


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        text: The layer as written.
        kind: ``conv``, ``linear``, ``maxpool``, ``avgpool``, ``mean`` (a pool over everything), or as written.
        out: Output channels or width; 0 where unchanged.
        kernel: Side of the window.
        stride: Stride of the window.
        padding: Padding at each edge.
        groups: Groups of channels.
        has_bias: Whether there is a bias.
    """

    text: str
    kind: str
    out: int = 0
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1
    has_bias: bool = True


@dataclass(frozen=True)
class Sum:
    """The sum of two paths from one tensor.

    Attributes:
        path: The first path.
        other: The second path; empty for the tensor itself.
    """

    path: tuple[Layer | Sum, ...]
    other: tuple[Layer | Sum, ...] = ()


Node = Layer | Sum


def read_network(text: str) -> tuple[tuple[int, ...], tuple[Node, ...]]:
    """Parses a network.

    Args:
        text: Such as ``3x32x32,16k3p1,bn,relu,avgpool,linear10``: convolutions are ``channels k kernel``, with ``s``
            stride (1), ``p`` padding (0), ``g`` groups (1) and ``b0`` or ``b1`` for a bias (no bias before ``bn``).

    Returns:
        The size of a sample, and the layers in order.

    Raises:
        UsageError: A word is not a layer, or a bracket is unmatched.
    """
    head, _, rest = "".join(text.split()).partition(",")
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", head):
        raise UsageError(f"a network starts with the size of a sample, such as 3x32x32 or 784, not {head!r}.")
    sample = tuple(int(size) for size in head.split("x"))
    if 0 in sample or len(sample) not in (1, 3):
        raise UsageError(f"a sample is one size (784) or channels x height x width (3x32x32), not {head}.")
    if not rest:
        raise UsageError(f"the network {text!r} has no layers: write them after the size of a sample.")
    return sample, _Reader(rest).sequence("")


class _Reader:
    """A parser that reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._place, self._depth = text, 0, 0

    def sequence(self, ends: str) -> tuple[Node, ...]:
        """Parses layers up to one of the given characters, or to the end of the text where there are none."""
        nodes: list[Node] = []
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UsageError(f"the network's brackets are nested more than {_DEEPEST} deep.")
        while True:
            nodes += self._item()
            if len(nodes) > _MOST_LAYERS:
                raise UsageError(f"the network has more than {_MOST_LAYERS:,} layers.")
            if self._peek() == ",":
                self._place += 1
            elif (self._peek() in ends) if self._peek() else not ends:
                self._depth -= 1
                return _without_bias_before_norm(nodes)
            else:
                where = f"at {self._text[self._place :][:20]!r}" if self._peek() else "at its end"
                expected = f"a comma or {' or '.join(ends)}" if ends else "a comma"
                raise UsageError(f"the network cannot be read {where}: {expected} is missing.")

    def _item(self) -> list[Node]:
        if self._peek() == "[":
            self._place += 1
            path = self.sequence("|]")
            other: tuple[Node, ...] = ()
            if self._peek() == "|":
                self._place += 1
                other = self.sequence("]")
            self._place += 1
            return [Sum(path, other)]
        if self._peek() == "(":
            self._place += 1
            inside = self.sequence(")")
            self._place += 1
            found = _REPEAT.match(self._text, self._place)
            if found is None:
                raise UsageError("a bracket ( ) needs a repeat count: write (relu)x3.")
            self._place = found.end()
            if int(found[1]) * len(inside) > _MOST_LAYERS:
                raise UsageError(f"the network has more than {_MOST_LAYERS:,} layers.")
            return list(inside) * int(found[1])
        found = re.compile(r"[^,|()\[\]]*").match(self._text, self._place)
        assert found is not None  # it also matches the empty string
        self._place = found.end()
        return [_layer(found[0])]

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]


def _layer(word: str) -> Layer:
    if word in _SIMPLE:
        return Layer(word, "mean" if word == "avgpool" else word)
    found = _CONVOLUTION.fullmatch(word)
    if found is not None:
        made = _options(found["options"])
        return Layer(
            word,
            "conv",
            _positive(found["channels"], word),
            _positive(found["kernel"], word),
            _positive(made.get("s", "1"), word),
            int(made.get("p", "0")),
            _positive(made.get("g", "1"), word),
            made.get("b", "") != "0",
        )
    found = _POOL.fullmatch(word)
    if found is not None:
        made, kernel = _options(found["options"]), _positive(found["kernel"], word)
        stride = _positive(made.get("s", str(kernel)), word)
        return Layer(word, found["kind"], 0, kernel, stride, int(made.get("p", "0")))
    found = _LINEAR.fullmatch(word)
    if found is not None:
        made = _options(found["options"])
        return Layer(word, "linear", _positive(found["width"], word), has_bias=made.get("b", "") != "0")
    raise UsageError(
        f"invalid layer {word!r}: write a convolution as 64k3s2p1, maxpool3s2p1, avgpool2, linear10, or one of "
        f"{', '.join(_SIMPLE)}."
    )


def _options(text: str) -> dict[str, str]:
    return dict(re.findall(r"([a-z])([0-9]+)", text))


def _positive(text: str, word: str) -> int:
    if int(text) == 0:
        raise UsageError(f"{word!r} has a size of 0.")
    return int(text)


def _without_bias_before_norm(nodes: list[Node]) -> tuple[Node, ...]:
    """Removes a convolution's bias before a batch norm unless it was requested: the norm cancels it."""
    made: list[Node] = []
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        is_before_norm = isinstance(after, Layer) and after.kind == "bn"
        if isinstance(node, Layer) and node.kind == "conv" and is_before_norm and "b" not in node.text:
            node = Layer(**{**node.__dict__, "has_bias": False})  # noqa: PLW2901 - the same layer without a bias
        made.append(node)
    return tuple(made)
