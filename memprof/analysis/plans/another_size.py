"""Scales the step to plan for to another batch or length than was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memprof.analysis.plans.basis import Basis, basis_of_steps, whole_steps
from memprof.analysis.plans.length_mix import mix_of
from memprof.errors import InconclusiveError, PolicyError
from memprof.planners.scaling.base import scale_by_shape
from memprof.planners.scaling.doubt import step_with_errors
from memprof.planners.scaling.samples import Samples, find_samples
from memprof.planners.scaling.sized import MeasuredSizes, scale_samples
from memprof.planners.scaling.times import Clock
from memprof.policies.accumulate.batch import likely_batch
from memprof.policies.plan.plan import Plan
from memprof.replay.allocator.rules import Settings
from memprof.replay.live import alive_at, distinct_steps, peak_op
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Beyond this multiple of the largest recorded size, kernels may use other algorithms.
_FAR = 4

#: Number of lengths from which quadratic growth can be fitted.
_FOR_SQUARES = 3

_MOST_SIZES_TOLD = 6

_BATCH_ADVICE = "Record the job twice with only the batch, or only the length, changed."
_LENGTH_ADVICE = (
    "Record steps of at least two lengths, better four (memprof record --steps 8), or add a recording of the job at "
    "another length with --also TRACE."
)


def at_batch(basis: Basis, runs: Sequence[Sequence[Step]], batch: int) -> Basis:
    """Scales a step to another batch.

    Args:
        basis: The step, with the times of the target machine.
        runs: The steps of its recording, then those of other recordings of the same job. With several batches, growth
            is measured; with one batch it is inferred from shapes.
        batch: The batch.

    Raises:
        InconclusiveError: The batch cannot be determined, or the recordings are of different jobs.
        UsageError: The batch is not positive.
    """
    found = _batches(basis.step, runs)
    if found is not None:
        sized = scale_samples(found.samples, what="batch")
        return replace(_scaled(basis, runs, found, sized, batch, "batch"), batch=batch)
    inferred = scale_by_shape(basis.step)
    if batch in inferred.sizes:
        return replace(basis, batch=batch)
    recorded = inferred.sizes[0]
    how = (
        f"scaled from one recording at batch {recorded} to {batch}: tensors with the batch among their dimensions grow "
        "with it. A recording at a second batch (--also) measures this instead."
    )
    warnings = (how, *_far(inferred.sizes, batch))
    step = step_with_errors(inferred, batch)
    return replace(
        basis, step=step, batch=batch, scaled_by=inferred.source, peaks={}, warnings=(*basis.warnings, *warnings)
    )


def at_length(basis: Basis, runs: Sequence[Sequence[Step]], length: int) -> Basis:
    """Scales a step to another sequence length.

    Args:
        basis: The step, with the times of the target machine.
        runs: The steps of its recording, then those of other recordings of the same job: at least two lengths.
        length: The length.

    Raises:
        InconclusiveError: The steps have the same length, or run different operators.
        UsageError: The length is not positive.
    """
    found = find_samples(runs, advice=_LENGTH_ADVICE)
    sized = scale_samples(found.samples, may_be_square=True, what="length")
    return replace(_scaled(basis, runs, found, sized, length, "length"), length=length)


def at_lengths(basis: Basis, runs: Sequence[Sequence[Step]], lengths: Sequence[int], settings: Settings) -> Basis:
    """Scales a step to the longest batch of a data set, and replays a mix of its batches through the allocator model.

    Args:
        basis: The step, with the times of the target machine.
        runs: The steps of its recording, then those of other recordings of the same job: at least two lengths.
        lengths: The length of each batch.
        settings: Settings of the allocator.

    Raises:
        InconclusiveError: The steps have the same length, or run different operators.
    """
    found = find_samples(runs, advice=_LENGTH_ADVICE)
    sized = scale_samples(found.samples, may_be_square=True, what="length")
    longest = max(lengths)
    scaled = _scaled(basis, runs, found, sized, longest, "length")
    return replace(scaled, length=longest, mix=mix_of(lengths, sized, settings))


def basis_at(trace: Trace, plan: Plan) -> Basis:
    """Returns the steps of a recording at the size a plan was made for.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        InconclusiveError: It contains no complete step, or cannot be scaled to that size.
    """
    basis = basis_of_steps(trace)
    if plan.at_length is not None:
        return at_length(basis, [whole_steps(trace)], plan.at_length)
    return basis if plan.at_batch is None else at_batch(basis, [whole_steps(trace)], plan.at_batch)


def _batches(step: Step, runs: Sequence[Sequence[Step]]) -> Samples | None:
    """Fits steps of several batches; None for a single recording whose steps have the same batch."""
    if len(runs) > 1:
        return find_samples(runs, advice=_BATCH_ADVICE)
    try:
        found = find_samples(runs, advice=_BATCH_ADVICE)
        is_batch = likely_batch(found.samples[-1].step) == found.samples[-1].size
    except (InconclusiveError, PolicyError):  # a single batch may still be inferred from shapes
        return None
    return found if is_batch and any(sample.step.number == step.number for sample in found.samples) else None


def _scaled(
    basis: Basis, runs: Sequence[Sequence[Step]], found: Samples, sized: MeasuredSizes, size: int, what: str
) -> Basis:
    step = step_with_errors(sized, size)
    numbers = {sample.step.number for sample in sized.samples if sample.run == 0}
    others = distinct_steps(step, (one for one in runs[0] if one.number not in numbers))
    how = (
        f"scaled from {len(sized.samples)} recorded steps at {what} {_listed(sized.sizes)} to {size}; the {what} is "
        f"{found.where} ({found.shapes[0]} to {found.shapes[1]})."
    )
    warnings = [how, *_guesses(sized, step, size, what), *_far(sized.sizes, size)]
    if others:
        count = len(others)
        warnings.append(
            f"{count} recorded {'step' if count == 1 else 'steps'} with other operators or sizes "
            f"{'counts' if count == 1 else 'count'} as recorded."
        )
    if Clock(sized.samples, sized.match.ops).is_guessed:
        warnings.append(
            f"operators were timed in one step only, of unknown {what}: step time is a guess from the bytes they touch."
        )
    return replace(
        basis,
        step=step,
        others=others,
        peaks={},
        scaled_by=sized.source,
        warnings=(*basis.warnings, *warnings),
    )


def _guesses(sized: MeasuredSizes, step: Step, size: int, what: str) -> list[str]:
    """Describes how much of a step's peak is not fitted, and how it is bounded."""
    guessed = sized.guessed(size) & (step.storages.requested_bytes > 0)
    held = int(step.storages.allocated_bytes[guessed & alive_at(step, peak_op(step))].sum())
    tensors, operators = int(guessed.sum()), int(sized.guessed_ops(size).sum())
    found = []
    if tensors:
        found.append(f"{tensors:,} {'tensor' if tensors == 1 else 'tensors'}, {format_bytes(held)} of the peak")
    if operators:
        found.append(f"the workspace of {operators:,} {'operator' if operators == 1 else 'operators'}")
    if not found:
        return []
    why = f"neither linear nor quadratic in the {what}"
    if len(sized.sizes) < _FOR_SQUARES:
        why = f"linear or quadratic, which two {what}s cannot distinguish"
    bound = f"the upper bound of the peak assumes the maximum. Record more {what}s, closer to the requested one."
    return [f"guess: {' and '.join(found)}: {why}; {bound}"]


def _far(sizes: Sequence[int], size: int) -> list[str]:
    if max(sizes) / _FAR <= size <= max(sizes) * _FAR:
        return []
    return [
        f"{size} is far from the recorded sizes: kernels may use other algorithms. Record closer to it if possible."
    ]


def _listed(sizes: Sequence[int]) -> str:
    if len(sizes) > _MOST_SIZES_TOLD:
        return f"{sizes[0]} to {sizes[-1]} ({len(sizes)} different)"
    words = [str(size) for size in sizes]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
