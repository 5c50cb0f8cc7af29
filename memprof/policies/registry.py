"""All policies, in the fixed order in which they are predicted and applied."""

from __future__ import annotations

from functools import cache

from memprof.policies.base import Policy


@cache
def policy_types() -> tuple[type[Policy], ...]:
    """Returns the policies in their order: shard, precision, accumulate, loss, checkpoint, swap, compress, ...

    Policies that change sizes come first, then those that change lifetimes, then those that run different code:
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
    """Returns the policy with this name, None if there is none."""
    return next((kind for kind in policy_types() if kind.name == name), None)


@cache
def default_policies() -> tuple[str, ...]:
    """Returns the names of the policies that a search uses where the user names none.

    These keep the numerics up to rounding and can be applied to an unmodified job. Where nothing fits with them, remat
    is tried.
    """
    return tuple(kind.name for kind in policy_types() if kind.tried_by_default)
