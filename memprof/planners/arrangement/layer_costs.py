"""What each layer of a step holds, passes on and takes on one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memprof.trace.schema import Floats


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """The units of a step: what comes before its layers, its layers in order, and what comes after them.

    Bytes and times are of one round of forward and backward of the recorded batch, each of shape ``(units,)``.

    Attributes:
        names: Their modules; the first and last are named ``before the layers`` and ``after the layers``.
        samples: Samples of the recorded batch.
        parameter_bytes: Their parameters.
        undivided_bytes: Of these, vectors, of which tensor parallelism keeps a copy on each rank.
        expert_bytes: Of these, parameters of experts.
        gradient_bytes: Gradients of the parameters.
        state_bytes: Their optimizer state.
        cast_bytes: Copies of parameters in another type that forward makes and backward reads.
        gathered_bytes: What ZeRO-3 gathers of a unit: its parameters in the type they are computed in.
        held_bytes: What is live at the end of its forward and was not at its start, without copies of parameters. A
            unit that frees what an earlier one made holds less than nothing.
        forward_bytes: Peak in its forward, above what earlier units hold.
        backward_bytes: Peak in its backward, above the same.
        first_backward_bytes: The same with its gradients, where backward makes them.
        boundary_bytes: What forward passes on to later units.
        forward_us: Time of its forward.
        backward_us: Time of its backward.
        attention_us: Of its forward, attention.
        forward_call_us: Of its forward, what its operators take whatever their size.
        backward_call_us: The same of its backward.
        attention_bytes: Keys and values of its attention.
        dispatched_bytes: What its experts return: the tokens sent to them.
        update_us: Time of the optimizer's update of the whole model, and of all else outside forward and backward.
        update_bytes: What the update makes in addition, at its peak.
        other_bytes: Buffers.
        input_bytes: Inputs.
        keeps_gradients: Whether gradients of the step before are live in forward.
        adds_gradients: Whether backward adds to them.
        sizes: Sizes of every matrix, which tensor parallelism divides: the larger of each.
    """

    names: tuple[str, ...]
    samples: int
    parameter_bytes: Floats
    undivided_bytes: Floats
    expert_bytes: Floats
    gradient_bytes: Floats
    state_bytes: Floats
    cast_bytes: Floats
    gathered_bytes: Floats
    held_bytes: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    first_backward_bytes: Floats
    boundary_bytes: Floats
    forward_us: Floats
    backward_us: Floats
    attention_us: Floats
    forward_call_us: Floats
    backward_call_us: Floats
    attention_bytes: Floats
    dispatched_bytes: Floats
    update_us: float
    update_bytes: int
    other_bytes: int
    input_bytes: int
    keeps_gradients: bool
    adds_gradients: bool
    sizes: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Number of layers, without what is before and after them."""
        return len(self.names) - 2

    @cached_property
    def total_parameter_bytes(self) -> float:
        """Parameters of the whole model."""
        return max(1.0, float(self.parameter_bytes.sum()))

    @property
    def experts(self) -> bool:
        """Whether any layer has experts."""
        return bool(self.expert_bytes.any())

    @property
    def has_attention(self) -> bool:
        """Whether attention ran, along whose sequence context parallelism divides."""
        return bool(self.attention_bytes.any())
