"""Every policy there is, in the one order in which they are applied and predicted."""

from __future__ import annotations

from functools import cache

from memprof.policies.base import Policy


@cache
def policy_types() -> tuple[type[Policy], ...]:
    """Returns the policies in their order: shard, precision, accumulate, loss, checkpoint, swap, compress, ...

    What changes sizes comes before what changes lives, and what changes lives before what runs on other code: a
    checkpoint frees what precision left, swap moves what checkpoint kept.
    """
    from memprof.policies.accumulate.policy import Accumulate
    from memprof.policies.allocator.policy import Allocator
    from memprof.policies.checkpoint.policy import Checkpoint
    from memprof.policies.compile.policy import Compile
    from memprof.policies.compress.policy import Compress
    from memprof.policies.loss.policy import ChunkedLoss
    from memprof.policies.optimizer.policy import OptimizerPolicy
    from memprof.policies.precision.policy import Precision
    from memprof.policies.remat.policy import Remat
    from memprof.policies.shard.policy import Shard
    from memprof.policies.swap.policy import Swap

    return (
        Shard,
        Precision,
        Accumulate,
        ChunkedLoss,
        Checkpoint,
        Swap,
        Compress,
        OptimizerPolicy,
        Compile,
        Remat,
        Allocator,
    )


def policy_type(name: str) -> type[Policy] | None:
    """Returns the policy of a name, None where there is none."""
    return next((kind for kind in policy_types() if kind.name == name), None)
