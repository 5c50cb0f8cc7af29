"""Networks of convolutions and linear layers: their parameters, and the tensors saved for backward."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.analysis.estimate.network_text import Layer, Node, Sum, read_network
from memprof.analysis.estimate.states import Parameter, count
from memprof.analysis.estimate.terms import Setting, Term
from memprof.errors import UsageError

#: Layers whose backward reads their input, and those whose backward reads their output (derivatives.yaml).
_READS_INPUT = frozenset({"conv", "linear", "bn", "gelu", "silu", "maxpool", "avgpool"})
_READS_OUTPUT = frozenset({"relu", "tanh", "sigmoid"})

_WORDS = {
    "conv": "outputs of convolutions",
    "linear": "outputs of linear layers",
    "bn": "outputs of batch norms",
    "maxpool": "outputs of pools",
    "avgpool": "outputs of pools",
    "mean": "outputs of pools",
    "sum": "sums of paths",
}


@dataclass
class _Tensor:
    """A tensor of the forward pass: its size per sample, its producer, and whether backward reads it."""

    shape: tuple[int, ...]
    kind: str
    is_kept: bool = False


@dataclass(frozen=True)
class Network:
    """A network without a sequence dimension: its layers, as parsed by `network_text`.

    Attributes:
        sample: Size of a sample: one number, or channels, height and width.
        nodes: The layers in order.
        parameters: All parameters.
        kept: Values saved for backward per sample, by kind of the producing layer; the sample itself excluded.
        masks: Values per sample after dropout.
        indices: Values per sample after max pools, which save indices.
        channels: Total channels of all batch norms, which save mean and deviation.
        outputs: Output values per sample.
    """

    sample: tuple[int, ...]
    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...]
    kept: dict[str, int] = field(hash=False)
    masks: int
    indices: int
    channels: int
    outputs: int

    @staticmethod
    def read(text: str) -> Network:
        """Parses a network; see `network_text.read_network`.

        Raises:
            UsageError: It cannot be parsed, or a layer does not match its input.
        """
        sample, nodes = read_network(text)
        walk = _Walk()
        first = _Tensor(sample, "sample")
        last = walk.run(nodes, first)
        kept = defaultdict[str, int](int)
        for tensor in walk.tensors:
            if tensor.is_kept:
                kept[tensor.kind] += math.prod(tensor.shape)
        return Network(
            sample,
            nodes,
            tuple(walk.parameters),
            dict(kept),
            walk.masks,
            walk.indices,
            walk.channels,
            math.prod(last.shape),
        )


def read_perceptron(text: str) -> Network:
    """Parses widths such as ``784,512,10``: linear layers with ReLU between them.

    Raises:
        UsageError: There are fewer than two widths, or one is not a number.
    """
    words = [word.strip() for word in text.split(",")]
    activation = "relu"
    if words and words[-1] in (*_READS_OUTPUT, "gelu", "silu"):
        activation = words.pop()
    if len(words) < 2 or not all(re.fullmatch("[1-9][0-9]{0,8}", word) for word in words):
        raise UsageError(
            f"invalid widths {text!r}: write --mlp 784,512,10, and append ,gelu for an activation other than ReLU."
        )
    return Network.read(f"{words[0]},{f',{activation},'.join(f'linear{word}' for word in words[1:])}")


def network_terms(shape: Network, setting: Setting) -> tuple[Term, ...]:
    """Returns every term of a network except weights, gradients and optimizer.

    Raises:
        UsageError: A setting has formulas only for transformers.
    """
    if setting.checkpoint != "none" or setting.tensor_ranks > 1:
        raise UsageError(
            "checkpointing and tensor parallelism are supported for transformers only: record the network with "
            "memprof record, and run memprof suggest."
        )
    batch, values = setting.tokens_at_once, setting.precision.products
    sizes = defaultdict[str, int](int)
    for kind, size in shape.kept.items():
        sizes[_WORDS.get(kind, f"outputs of {kind}")] += size
    made = [
        Term(
            "activations",
            name,
            batch * size * values,
            f"{values} b x {size:,}",
            "a tensor has b x channels x height x width values (b x width after a linear layer); saved are those "
            "that backward reads, by torch's derivatives.yaml",
            "an operator works in place on a saved tensor, or kernels are fused",
        )
        for name, size in sizes.items()
    ]
    if shape.masks and setting.has_dropout:
        mask = setting.mask_bytes(values)
        made.append(_small("dropout's masks", batch * shape.masks * mask, f"{mask} b x {shape.masks:,}"))
    if shape.indices:
        made.append(_small("max pools' indices", batch * shape.indices * 8, f"8 b x {shape.indices:,}"))
    if shape.channels:
        made.append(_small("statistics of batch norms", 8 * shape.channels, f"8 x {shape.channels:,}"))
    casts = setting.precision.casts
    if casts:
        products = count(one for one in shape.parameters if one.is_product)
        made.append(_small("weights cast to 16 bits", casts * products, f"{casts} x {products:,}"))
    kept = setting.loss_bytes
    made.append(
        Term(
            "ends",
            "log-probabilities",
            batch * shape.outputs * kept,
            f"{kept} b x {shape.outputs:,}",
            "torch's log_softmax saves its output",
            "the loss is not a cross-entropy over the network's output",
        )
    )
    return tuple(made)


def network_letters(setting: Setting) -> dict[str, int]:
    """Returns the symbols used in the formulas, with their values."""
    return {"b": setting.tokens_at_once}


def _small(name: str, size: int, formula: str) -> Term:
    return Term("activations", name, size, formula, "torch's derivatives.yaml: what backward of the layer reads")


class _Walk:
    """Propagates sizes through a network."""

    def __init__(self) -> None:
        self.tensors: list[_Tensor] = []
        self.parameters: list[Parameter] = []
        self.masks = self.indices = self.channels = 0

    def run(self, nodes: Sequence[Node], tensor: _Tensor) -> _Tensor:
        for node in nodes:
            tensor = self._sum(node, tensor) if isinstance(node, Sum) else self._layer(node, tensor)
        return tensor

    def _sum(self, node: Sum, tensor: _Tensor) -> _Tensor:
        left, right = self.run(node.path, tensor), self.run(node.other, tensor)
        if left.shape != right.shape:
            raise UsageError(f"cannot add two paths with outputs of {_size(left)} and {_size(right)}.")
        return self._make(left.shape, "sum")

    def _layer(self, layer: Layer, tensor: _Tensor) -> _Tensor:
        if layer.kind == "flatten":  # a view: saving it saves the tensor, and linear layers count all its values
            return tensor
        if layer.kind in _READS_INPUT:
            tensor.is_kept = True
        made = self._make(self._out(layer, tensor), layer.kind)
        made.is_kept = layer.kind in _READS_OUTPUT
        if layer.kind == "bn":
            channels = tensor.shape[0]
            self.channels += channels
            self.parameters += [Parameter("batch norm", (channels,)), Parameter("batch norm bias", (channels,))]
        elif layer.kind == "dropout":
            self.masks += math.prod(tensor.shape)
        elif layer.kind == "maxpool":
            self.indices += math.prod(made.shape)
        return made

    def _out(self, layer: Layer, tensor: _Tensor) -> tuple[int, ...]:
        """Returns the output size, and lists the layer's parameters."""
        shape = tensor.shape
        if layer.kind == "linear":
            width = math.prod(shape)
            self._add(layer, (layer.out, width))
            return (layer.out,)
        if layer.kind not in ("conv", "maxpool", "avgpool", "mean"):
            return shape
        if len(shape) != 3:
            raise UsageError(f"{layer.text!r} needs channels x height x width, but its input is {_size(tensor)}.")
        channels, *sides = shape
        if layer.kind == "mean":
            return (channels, 1, 1)
        if layer.kind == "conv":
            if channels % layer.groups or layer.out % layer.groups:
                raise UsageError(f"{layer.text!r} does not divide {channels} channels into {layer.groups} groups.")
            self._add(layer, (layer.out, channels // layer.groups, layer.kernel, layer.kernel))
            channels = layer.out
        # Dumoulin and Visin 2016, A guide to convolution arithmetic, relationship 6.
        new = [(side + 2 * layer.padding - layer.kernel) // layer.stride + 1 for side in sides]
        if min(new) < 1:
            raise UsageError(f"{layer.text!r} leaves nothing of {_size(tensor)}.")
        return (channels, *new)

    def _add(self, layer: Layer, shape: tuple[int, ...]) -> None:
        self.parameters.append(Parameter(layer.kind, shape, is_product=True))
        if layer.has_bias:
            self.parameters.append(Parameter(f"{layer.kind} bias", (layer.out,)))

    def _make(self, shape: tuple[int, ...], kind: str) -> _Tensor:
        tensor = _Tensor(shape, kind)
        self.tensors.append(tensor)
        return tensor


def _size(tensor: _Tensor) -> str:
    return "x".join(map(str, tensor.shape))
