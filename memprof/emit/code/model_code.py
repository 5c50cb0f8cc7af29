"""The code of a whole plan, policy by policy, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memprof.emit.code.checkpoint import checkpoint_code
from memprof.emit.code.pieces import Code
from memprof.emit.code.short_pieces import allocator_code, compile_code, optimizer_code, precision_code
from memprof.emit.code.swap import swap_code
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import Policy
from memprof.policies.checkpoint.kinds import kept_operators
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap

#: Splits a batch, and weights each part by its share of the samples.
_MICRO_BATCHES = '''
def micro_batches(batch, count={count}):
    """Yields the parts of tensors in tuples, lists and dicts, and each part's share of the samples."""
    size = next(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    count = min(count, size)
    edges = [number * (size // count) + min(number, size % count) for number in range(count + 1)]
    for first, last in pairwise(edges):

        def take(leaf, rows=slice(first, last)):
            is_split = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
            return leaf[rows] if is_split else leaf

        yield tree_map(take, batch), (last - first) / size
'''


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
            codes.append(_runtime_code(tuple(waiting), groups, has_optimizer=has_optimizer))
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
        codes.append(_runtime_code(tuple(waiting), groups, has_optimizer=has_optimizer))
    if parts > 1:
        codes.append(_accumulate_code(parts))
    scaled = any(isinstance(each, Precision) and each.dtype == "fp16" for each in policies)
    return PlanCode(tuple(codes), has_scaler=scaled, parts=parts)


def _accumulate_code(count: int) -> Code:
    """Returns the code that splits batches into ``count`` parts."""
    return Code(
        imports=(
            "import torch",
            "from itertools import pairwise",
            "from torch.utils._pytree import tree_leaves, tree_map",
        ),
        helpers=(_MICRO_BATCHES.format(count=count),),
        notes=(
            (
                "accumulate: split the batch in your loop, as shown at the top; gradients are those of the whole "
                "batch if the loss is a mean over its samples."
            ),
        ),
    )


def _runtime_code(policies: tuple[Policy, ...], number: int, *, has_optimizer: bool = True) -> Code:
    """Returns code that applies policies without an equivalent in torch through memprof, which must be installed.

    Args:
        policies: Consecutive policies of the plan.
        number: Index of this group in the plan, from 0.
        has_optimizer: Whether the applying function receives the optimizer.
    """
    name = f"_PLAN_{number}" if number else "_PLAN"
    text = format_plan(Plan(policies)).strip("\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    optimizer = ", optimizer" if has_optimizer else ""
    return Code(
        imports=("import memprof",),
        helpers=(
            (f'# The part of the plan without an equivalent in torch; memprof applies it.\n{name} = """\n{text}\n"""'),
        ),
        calls=(f"memprof.apply(memprof.parse_plan({name}), model{optimizer})",),
        needs_optimizer=any(each.needs_optimizer for each in policies),
        notes=tuple(
            f"{each.describe()}: needs memprof where the job runs, as {each.why_not_torch}." for each in policies
        ),
    )
