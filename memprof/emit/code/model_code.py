"""The code of a whole plan, policy by policy, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memprof.emit.code.accumulate import accumulate_code
from memprof.emit.code.allocator import allocator_code
from memprof.emit.code.checkpoint import checkpoint_code
from memprof.emit.code.compile import compile_code
from memprof.emit.code.optimizer import optimizer_code
from memprof.emit.code.pieces import Code
from memprof.emit.code.precision import precision_code
from memprof.emit.code.runtime import runtime_code
from memprof.emit.code.swap import swap_code
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import Policy
from memprof.policies.checkpoint.kinds import kept_operators
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap


@dataclass(frozen=True)
class PlanCode:
    """The code of a plan's policies.

    Attributes:
        codes: The code of each policy, in order.
        has_scaler: Whether the loop needs a GradScaler.
        parts: Number of micro-batches the loop splits a batch into, 1 for none.
    """

    codes: tuple[Code, ...]
    has_scaler: bool = False
    parts: int = 1

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from memprof, or is left to the reader."""
        return tuple(dict.fromkeys(note for code in self.codes for note in code.notes))

    @property
    def calls(self) -> tuple[str, ...]:
        """The statements that apply the plan."""
        return tuple(call for code in self.codes for call in code.calls)

    @property
    def needs_optimizer(self) -> bool:
        """Whether these statements need the optimizer."""
        return any(code.needs_optimizer for code in self.codes)


def plan_code(policies: Sequence[Policy], *, has_optimizer: bool = True) -> PlanCode:
    """Returns the code of policies.

    Args:
        policies: Policies in their order, none of them a shard.
        has_optimizer: Whether the caller has access to the optimizer.
    """
    codes: list[Code] = []
    waiting: list[Policy] = []
    swaps = groups = 0
    parts = 1
    kept = [kept_operators(each.keep) for each in policies if isinstance(each, Checkpoint)]
    has_keep, has_calls = any(kept), any(each.calls for each in kept)
    for policy in policies:
        if policy.why_not_torch:
            waiting.append(policy)
            continue
        if waiting:
            codes.append(runtime_code(tuple(waiting), groups, has_optimizer=has_optimizer))
            groups, waiting = groups + 1, []
        match policy:
            case Checkpoint():
                codes.append(checkpoint_code(policy, has_keep=has_keep, has_calls=has_calls))
            case Precision():
                codes.append(precision_code(policy))
            case Swap():
                codes.append(swap_code(policy, swaps))
                swaps += 1
            case OptimizerPolicy():
                codes.append(optimizer_code(policy))
            case Compile():
                codes.append(compile_code(policy))
            case Allocator():
                codes.append(allocator_code(policy))
            case Accumulate():
                parts *= policy.micro_batches
            case _:
                raise AssertionError(f"{policy.name} has no code")
    if waiting:
        codes.append(runtime_code(tuple(waiting), groups, has_optimizer=has_optimizer))
    if parts > 1:
        codes.append(accumulate_code(parts))
    scaled = any(isinstance(each, Precision) and each.dtype == "fp16" for each in policies)
    return PlanCode(tuple(codes), has_scaler=scaled, parts=parts)
