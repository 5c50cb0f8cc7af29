"""The costs of a step's layers: on one device, and of each unit on one rank of an arrangement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.planners.arrangement.arrangement import Arrangement, Cluster
from memprof.trace.schema import Bools, Floats

#: Collectives of a layer's activations in forward under tensor and sequence parallelism, and the same in backward: an
#: all-gather before attention and before the MLP, a reduce-scatter after each (Korthikanti et al. 2022, section 4.2.2).
_TENSOR_COLLECTIVES = 4


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


@dataclass(frozen=True, eq=False)
class ScaledCosts:
    """Costs of each unit on one rank; arrays of shape ``(units,)``.

    Attributes:
        parameter_bytes: Parameters, divided by tensor and expert parallelism, whole of the rest.
        gradient_bytes: Their gradients.
        state_bytes: Their optimizer state.
        cast_bytes: Their copies in another type, held from forward to backward.
        recast_bytes: The same of a layer that runs again, while it does.
        gathered_bytes: What ZeRO-3 gathers.
        kept_bytes: What a micro-batch keeps from forward to backward on the device.
        forward_bytes: Peak in forward, above what earlier units keep.
        backward_bytes: Peak in backward, above the same.
        first_backward_bytes: The same with the unit's gradients, where backward makes them.
        boundary_bytes: What is sent to the next stage.
        forward_us: Time of a micro-batch's forward, communication within layers included.
        backward_us: The same for backward, recompute included.
        communication_us: Of both, communication.
    """

    parameter_bytes: Floats
    gradient_bytes: Floats
    state_bytes: Floats
    cast_bytes: Floats
    recast_bytes: float
    gathered_bytes: Floats
    kept_bytes: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    first_backward_bytes: Floats
    boundary_bytes: Floats
    forward_us: Floats
    backward_us: Floats
    communication_us: Floats

    @cached_property
    def state_sums(self) -> Floats:
        """Sums over the units before each, shape ``(5, units + 1)``: parameters, gradients, state, copies, gathered."""
        rows = (self.parameter_bytes, self.gradient_bytes, self.state_bytes, self.cast_bytes, self.gathered_bytes)
        return np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def kept_sums(self) -> Floats:
        """Sums of ``kept_bytes`` over the units before each, shape ``(units + 1,)``."""
        return np.append(0.0, np.cumsum(self.kept_bytes))


def scale_costs(costs: LayerCosts, arrangement: Arrangement, cluster: Cluster) -> ScaledCosts:
    """Divides the recorded costs over the ranks of an arrangement.

    Activations and times are proportional to the samples of a micro-batch, and divided by tensor, sequence and context
    parallelism; matrices by tensor parallelism, vectors not.
    """
    tensor, context, expert = arrangement.tensor, arrangement.context, arrangement.expert
    share = arrangement.samples / costs.samples / (tensor * context)
    dense = costs.parameter_bytes - costs.undivided_bytes - costs.expert_bytes
    divided = costs.undivided_bytes + dense / tensor + costs.expert_bytes / tensor / expert
    ratio = np.divide(divided, costs.parameter_bytes, out=np.ones_like(divided), where=costs.parameter_bytes > 0)
    boundary = costs.boundary_bytes * share
    held, forward, backward = (part * share for part in (costs.held_bytes, costs.forward_bytes, costs.backward_bytes))
    gradients = costs.first_backward_bytes - costs.backward_bytes
    inside_forward, inside_backward = _inside_us(costs, arrangement, cluster)
    forward_us = costs.forward_call_us + (costs.forward_us - costs.forward_call_us) * share
    backward_us = costs.backward_call_us + (costs.backward_us - costs.backward_call_us) * share
    again = _checkpointed(len(held), arrangement.checkpointed)
    inputs = np.concatenate(([0.0], boundary[:-1]))
    kept = np.where(again, inputs, held)
    # The input of a layer that runs again is kept for it; what it returns is not needed a second time.
    backward = backward + np.where(again, inputs - np.minimum(boundary, np.maximum(held, 0.0)), 0.0)
    casts = costs.cast_bytes * ratio
    repeated = np.where(again, forward_us + inside_forward, 0.0)
    if arrangement.offloaded == "activations" and cluster.host_bytes_per_us:
        # Copies overlap with the computation; where they take longer, it waits for them, in both directions.
        copied = np.maximum(kept, 0.0) / cluster.host_bytes_per_us
        late_forward = np.maximum(0.0, copied - forward_us - inside_forward)
        late_backward = np.maximum(0.0, copied - backward_us - inside_backward - repeated)
        # Two units are on the device at once: one being copied, one being computed.
        backward = backward + float(np.max(kept, initial=0.0))
        forward = forward + float(np.max(kept, initial=0.0))
        kept = np.zeros_like(kept)
    else:
        late_forward = late_backward = np.zeros_like(kept)
    return ScaledCosts(
        parameter_bytes=costs.parameter_bytes * ratio,
        gradient_bytes=costs.gradient_bytes * ratio,
        state_bytes=costs.state_bytes * ratio,
        cast_bytes=np.where(again, 0.0, casts),
        recast_bytes=float(casts[again].max(initial=0.0)),
        gathered_bytes=costs.gathered_bytes * ratio,
        kept_bytes=kept,
        forward_bytes=forward,
        backward_bytes=backward,
        first_backward_bytes=backward + gradients * ratio,
        boundary_bytes=boundary,
        forward_us=forward_us + inside_forward + late_forward,
        backward_us=backward_us + inside_backward + repeated + late_backward,
        communication_us=inside_forward + inside_backward + np.where(again, inside_forward, 0.0),
    )


def _checkpointed(units: int, which: str) -> Bools:
    """Returns which units run again in backward: all layers, every second one, or none. Only layers do."""
    again = np.zeros(units, dtype=np.bool_)
    if which != "none":
        again[1 : -1 : 1 if which == "all" else 2] = True
    return again


def _inside_us(costs: LayerCosts, arrangement: Arrangement, cluster: Cluster) -> tuple[Floats, Floats]:
    """Returns the exposed communication of each unit's forward and backward: tensor, context and expert parallelism."""
    share = arrangement.samples / costs.samples
    count = len(costs.names)
    forward, backward = np.zeros(count), np.zeros(count)
    is_layer = np.ones(count, dtype=np.bool_)
    is_layer[[0, -1]] = False
    tensor = cluster.group(arrangement.tensor, 1)
    if arrangement.tensor > 1:
        sent = costs.boundary_bytes.copy()
        sent[-1] = costs.boundary_bytes[-2] if count > 1 else 0.0
        once = np.array([tensor.all_gather_us(each * share / arrangement.context) for each in sent])
        rounds = np.where(is_layer, _TENSOR_COLLECTIVES, 1)
        forward += rounds * once
        backward += rounds * once
    if arrangement.context > 1:
        ring = cluster.group(arrangement.context, arrangement.tensor)
        whole = costs.attention_bytes * share / arrangement.tensor
        turns = np.where(whole > 0, [ring.all_gather_us(each) for each in whole], 0.0)
        own = costs.attention_us * share / (arrangement.tensor * arrangement.context)
        # Keys and values travel while attention is computed; in backward their gradients as well.
        forward += np.maximum(0.0, turns - own)
        backward += np.maximum(0.0, 2 * turns - 2 * own)
    if arrangement.expert > 1:
        group = cluster.group(arrangement.expert, arrangement.tensor * arrangement.context)
        sent = costs.dispatched_bytes * share / (arrangement.tensor * arrangement.context)
        there_and_back = np.where(sent > 0, [2 * group.all_to_all_us(each) for each in sent], 0.0)
        forward += there_and_back
        backward += there_and_back
    return forward, backward
