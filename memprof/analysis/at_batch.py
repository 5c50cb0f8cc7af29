"""The step that plans are made for, at another batch than it was recorded at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memprof.analysis.basis import Basis
from memprof.planners.space.largest import sized_step
from memprof.trace.step import Step

#: Beyond so many times the largest recorded batch, kernels may have switched to other algorithms.
_FAR = 4


def at_batch(basis: Basis, others: Sequence[Step], batch: int) -> Basis:
    """Scales a step to another batch.

    Args:
        basis: The step, with the times of the machine it is to run on.
        others: The same step recorded at other batches: what grows is then measured, not inferred from shapes.
        batch: The batch.

    Raises:
        InconclusiveError: The recordings do not tell the batch, or are not of one job.
        UsageError: The batch is not positive.
    """
    sized = sized_step([basis.step, *others])
    step = sized.step_at(batch)
    if batch in sized.sizes and len(sized.sizes) == 1:
        return replace(basis, batch=batch)
    recorded = " and ".join(str(size) for size in sized.sizes)
    warnings = list(basis.warnings)
    if len(sized.sizes) == 1:
        warnings.append(
            f"scaled from one recording at batch {recorded} to {batch}: what has the batch among its dimensions grows "
            "with it. A recording at a second batch, with --also, tells it instead of shapes."
        )
    else:
        warnings.append(f"scaled from recordings at batch {recorded} to {batch}.")
    if not max(sized.sizes) / _FAR <= batch <= max(sized.sizes) * _FAR:
        warnings.append(
            f"{batch} is far from what was recorded: kernels may work otherwise there. Record nearer to it if you can."
        )
    return replace(basis, step=step, batch=batch, scaled_by=sized.source, warnings=tuple(warnings))
