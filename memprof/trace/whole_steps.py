"""Whether a recording contains complete steps, and ones that ran without the recorder."""

from __future__ import annotations

from memprof.errors import InconclusiveError
from memprof.trace.cut import cuttable_steps
from memprof.trace.schema import Optimizers, OutOfMemory, Steps
from memprof.trace.store import Trace


def has_whole_step(trace: Trace) -> bool:
    """Whether a recording contains a complete step with all the memory a step needs.

    The first step of a job that ran out of memory soon after does not: its forward ran without optimizer state.
    """
    steps, optimizers = trace.table(Steps), trace.table(Optimizers)
    is_whole = cuttable_steps(steps) & steps.is_complete
    makes_state = bool((optimizers.state_bytes > 0).any() or (optimizers.full_state_bytes > 0).any())
    if has_run_out(trace) and makes_state:
        is_whole &= steps.step > 0
    return bool(is_whole.any())


def has_run_out(trace: Trace) -> bool:
    """Whether the job ran out of memory without catching it."""
    return bool((~trace.table(OutOfMemory).is_caught).any())


def is_cut_short(trace: Trace) -> bool:
    """Whether steps were recorded, but none of them completely."""
    return bool((trace.table(Steps).first_op_id >= 0).any()) and not has_whole_step(trace)


def require_whole_step(trace: Trace) -> None:
    """Rejects a recording without a complete step.

    Raises:
        InconclusiveError: It contains no complete step, for example because memory ran out in the first.
    """
    if is_cut_short(trace):
        raise InconclusiveError(
            f"{trace.path} contains no complete step ({trace.manifest.capture.reason or 'cut short'}), so the memory "
            "of its backward and optimizer is unknown. Record the job with --dry-run, which does "
            "not run out of memory, or with a smaller batch that fits, and plan from that recording."
        )


def has_untouched_step(trace: Trace) -> bool:
    """Whether a trace contains a step that ran without the recorder, which gives the step time."""
    steps = trace.table(Steps)
    return bool(((steps.kind == "plain") & steps.is_complete).any())
