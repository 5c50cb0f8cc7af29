"""Operator times of a step by stream, and estimates of them on another machine.

Each operator is assumed to be bound by memory or by products, on either machine; its recorded time is scaled by the
ratio of the two bounds (the roofline: Williams, Waterman & Patterson 2009, Roofline: An Insightful Visual Performance
Model, section 3; the ratio preserves an operator's efficiency, which they do not model). Where a bound is unknown, an
operator keeps its time, and is counted. Limitation: launch latency is not modelled, so from a CPU to a GPU, small
operators come out too fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memprof.machines.catalogue import Accelerator, machine_of_device, product_rates
from memprof.trace.manifest import Machine
from memprof.trace.schema import Bools, Floats
from memprof.trace.step import Step, largest_written
from memprof.units import format_percent

#: Element types, mapped to the catalogue's product rates. fp32 is without TF32: torch's own default.
_PRECISION = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


def busiest_stream_us(step: Step) -> float:
    """Returns the operator time of the busiest stream in microseconds, copies included; 0 where none has a time."""
    ops = step.ops
    is_known = ~np.isnan(ops.duration_us) & (ops.kind != "allocation")
    _, stream = np.unique(ops.stream, return_inverse=True)
    return float(np.bincount(stream, np.where(is_known, ops.duration_us, 0.0)).max(initial=0.0))


def op_cost_us(step: Step) -> Floats:
    """Returns the time that rerunning each operator adds to the step: its own time and its executor share.

    Operators alone never fill a step: Kirisame 2021 (Dynamic Tensor Rematerialization, section 5) finds real slowdowns
    4 to 14 points above the summed recompute cost. The step's time over that of its busiest stream, at least 1,
    captures this overhead, measured in the recording.

    Returns:
        Microseconds, shape ``(ops,)``; 0 where the time is unknown.
    """
    own, busy_us = np.where(np.isnan(step.ops.duration_us), 0.0, step.ops.duration_us), busiest_stream_us(step)
    return own * (max(1.0, step.duration_us / busy_us) if busy_us > 0 else 1.0)


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine; unknown ones are 0 or missing.

    Attributes:
        name: Its name.
        memory_bytes_per_us: Memory bandwidth.
        flops_per_us: Matrix product rate by element type, as named in the catalogue.
        host_bytes_per_us: Bandwidth between device and host in one direction.
        how: Source of the figures, a clause.
    """

    name: str
    memory_bytes_per_us: float
    flops_per_us: Mapping[str, float] = field(default_factory=dict)
    host_bytes_per_us: float = 0.0
    how: str = ""


@dataclass(frozen=True, eq=False)
class TimesElsewhere:
    """A step with times scaled to another machine.

    Attributes:
        step: The step; only times differ.
        source: Source of the times (policies.base.SOURCES): ``modelled``, or ``measured`` where they are still those of
            the recording.
        how: One sentence on how times were scaled, and which were not.
        scaled_share: Share of the operators' recorded time that was scaled.
    """

    step: Step
    source: str
    how: str
    scaled_share: float


def rates_of_recording(machine: Machine) -> Rates | None:
    """Returns the recording machine's speeds, measured or from the catalogue; None where neither is available."""
    speed = machine.speed
    if speed.memory_bytes_per_us > 0:
        products = {"fp32": speed.fp32_flops_per_us, "bf16": speed.bf16_flops_per_us}
        return Rates(
            name=machine.device_name,
            memory_bytes_per_us=speed.memory_bytes_per_us,
            flops_per_us={kind: rate for kind, rate in products.items() if rate > 0},
            host_bytes_per_us=min(speed.to_host_bytes_per_us, speed.from_host_bytes_per_us),
            how=speed.how,
        )
    known = machine_of_device(machine.device_name)
    return None if known is None else rates_of(known)


def rates_of(machine: Accelerator) -> Rates:
    """Returns the peak speeds of a catalogue machine."""
    return Rates(
        name=machine.name,
        memory_bytes_per_us=machine.memory_bytes_per_us,
        flops_per_us=dict(machine.flops_per_us),
        host_bytes_per_us=machine.host_bytes_per_us,
        how="vendor peak rates",
    )


def scale_times(step: Step, recording: Rates | None, target: Rates) -> TimesElsewhere:
    """Scales operator times from the recording machine to another.

    Python's own time, and all other step time outside operators, stays as recorded. On a device, Python runs ahead of
    it, so the step may take less.

    Args:
        step: A recorded or transformed step.
        recording: Speeds of the machine the times are from; None where unknown.
        target: Speeds of the other.
    """
    if recording is None:
        return TimesElsewhere(
            step,
            "measured",
            f"Times are those of the recording machine: its speed was not recorded, so they do not apply to "
            f"{target.name}.",
            0.0,
        )
    ops = step.ops
    ratio, is_known = _ratios(step, recording, target)
    own = np.where(np.isnan(ops.duration_us), 0.0, ops.duration_us)
    is_known &= own > 0
    scaled = dataclasses.replace(
        step, ops=ops.replace(duration_us=np.where(is_known, ops.duration_us * ratio, ops.duration_us))
    )
    busy, busy_there = busiest_stream_us(step), busiest_stream_us(scaled)
    beyond = step.duration_us - busy  # Python, framework overhead and waiting
    # Operators timed one by one may take longer than the step: then it shrinks in proportion.
    duration = busy_there + beyond if beyond >= 0 or busy <= 0 else step.duration_us * busy_there / busy
    share = float(own[is_known].sum() / own.sum()) if own.sum() > 0 else 0.0
    left = int((~is_known & (own > 0)).sum())
    how = (
        f"Times are modelled for {target.name} ({target.how}) from those of {recording.name} ({recording.how}): each "
        f"operator by the ratio of its bounds, memory bandwidth or matrix products"
    )
    if left:
        how += f"; {left} operators, {format_percent(1 - share)} of the time, have no known bound and are not scaled"
    there = dataclasses.replace(
        scaled,
        duration_us=duration,
        to_host_bytes_per_us=target.host_bytes_per_us,
        from_host_bytes_per_us=target.host_bytes_per_us,
        product_flops_per_us=product_rates(target.flops_per_us),
    )
    return TimesElsewhere(there, "modelled", f"{how}.", share)


def _ratios(step: Step, recording: Rates, target: Rates) -> tuple[Floats, Bools]:
    """Returns the ratio of the bounds of each operator, and which are known on both machines."""
    here, is_known_here = _bounds(step, recording)
    there, is_known_there = _bounds(step, target)
    is_known: Bools = is_known_here & is_known_there & (here > 0)
    return np.divide(there, here, out=np.ones(len(here)), where=is_known), is_known


def _bounds(step: Step, rates: Rates) -> tuple[Floats, Bools]:
    """Returns each operator's minimum time on a machine, in microseconds, and where it is known.

    Unknown where an operator multiplies in a type of unknown rate, copies over a link of unknown bandwidth, or
    communicates with other devices.
    """
    ops = step.ops
    moved = (ops.read_bytes + ops.written_bytes).astype(np.float64)
    by_memory = moved / rates.memory_bytes_per_us if rates.memory_bytes_per_us > 0 else np.zeros(len(ops))
    precision = product_kinds(step)
    rate = np.array([rates.flops_per_us.get(kind, 0.0) for kind in precision.tolist()])
    multiplies = ops.flops > 0
    by_products = np.divide(ops.flops, rate, out=np.zeros(len(ops)), where=rate > 0)
    is_copy, is_collective = ops.kind == "copy", ops.kind == "collective"
    by_link = ops.written_bytes / rates.host_bytes_per_us if rates.host_bytes_per_us > 0 else np.zeros(len(ops))
    bound: Floats = np.where(is_copy, by_link, np.maximum(by_memory, by_products))
    is_known: Bools = (bound > 0) & ~is_collective & (~multiplies | (rate > 0))
    if rates.memory_bytes_per_us <= 0:
        is_known &= is_copy
    return bound, is_known


def product_kinds(step: Step) -> np.ndarray:
    """Returns the element type that each operator multiplies in, shape ``(ops,)``: ``fp32``, "" for unknown ones.

    It is that of the largest storage that the operator makes or changes.
    """
    types = [*step.storages.dtype.tolist(), ""]
    kinds = np.array([_PRECISION.get(dtype, "") for dtype in types], dtype=np.object_)
    found: np.ndarray = kinds[largest_written(step.ops, step.storages, step.uses)]
    return found
