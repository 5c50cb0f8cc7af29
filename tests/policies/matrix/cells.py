"""The policies of the matrix, from the registry, and the result of each with each usage."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.compress.policy import Compress
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import policy_types
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap
from tests.policies.matrix.catalog import Usage
from tests.policies.matrix.world import Outcome, World

#: Settings by flag beside the example of the registry; a policy that is not here is tried with its example alone.
FLAGS = {
    "checkpoint": ("layers.*", ".", "layers.*.linear"),
    "accumulate": ("2", "4"),
    "loss": ("4,head", "2"),
    "optimizer": ("in-backward", "fused", "loop", "foreach", "in-backward,foreach"),
    "precision": ("bf16", "fp16", "pure-bf16"),
    "swap": ("layers.*:disk", "optimizer:disk", "parameters:disk"),
    "compress": ("layers.*", "."),
}
#: Settings that no flag can say here: one process has one rank.
OTHERS: dict[str, tuple[Policy, ...]] = {
    "shard": (Shard(stage=3, world_size=1),),
    "remat": (Remat(recompute=("layers.0:aten.gelu.default:0", "layers.1:aten.gelu.default:0")), Remat(budget="8GiB")),
}

#: How far numbers under a policy may be from those of the plain run, as a share of how far training moved them.
TOLERANCES = {"rounding": 1e-3, "approximate": 0.1, "none": 0.0}


@dataclass(frozen=True)
class Cell:
    """The result of a usage under a plan.

    Attributes:
        state: "passes", "refused" or "fails".
        sentence: Why it does not pass.
        updates: Updates that were made before it was refused.
    """

    state: str
    sentence: str = ""
    updates: int = 0


def examples(kind: type[Policy]) -> tuple[Policy, ...]:
    """Returns the settings with which a policy is in the matrix.

    Raises:
        AssertionError: There are none; the sentence says what to write.
    """
    if kind.name in OTHERS:
        return OTHERS[kind.name]
    flags = FLAGS.get(kind.name, (kind.flag_example.strip("'"),))
    assert all(flags), (
        f"policy {kind.name} has no example for the matrix: set flag_example to one that fits a model with layers.* "
        "and head, or add settings to FLAGS in tests/policies/matrix/cells.py"
    )
    return tuple(_for_small_models(kind.from_flag(flag)) for flag in flags)


def _for_small_models(policy: Policy) -> Policy:
    """Returns a policy that takes tensors of any size."""
    changes: dict[str, Any] = {"minimum_bytes": 1}
    return dataclasses.replace(policy, **changes) if hasattr(policy, "minimum_bytes") else policy  # type: ignore[type-var]


def single_plans() -> list[Plan]:
    """Returns a plan of each policy and setting."""
    return [Plan((policy,)) for kind in policy_types() for policy in examples(kind)]


def pair_plans() -> list[Plan]:
    """Returns a plan of each two policies."""
    pairs = itertools.combinations(policy_types(), 2)
    return [Plan((a, b)) for first, second in pairs for a in examples(first) for b in examples(second)]


def title_of(plan: Plan) -> str:
    """Names a plan in a few words."""
    return " + ".join(_title(policy) for policy in plan.policies)


def _title(policy: Policy) -> str:
    if isinstance(policy, Shard):
        return "shard"
    if isinstance(policy, Swap):
        return f"swap {policy.what}"
    if isinstance(policy, Remat):
        return f"remat {policy.budget or 'of keys'}"
    if isinstance(policy, (ChunkedLoss, Compress, OptimizerPolicy, Precision)):
        return policy.describe().partition(", from")[0]
    return policy.describe()


def run_cell(plan: Plan, usage: Usage) -> Cell:
    """Runs a usage under a plan, and compares with the plain run."""
    expected = plain_outcome(usage)
    jobs: list[Job] = []

    def apply(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        job = Job(model, optimizers)
        plan.apply(job)
        jobs.append(job)

    updates: list[int] = []
    counting = register_optimizer_step_post_hook(lambda *_: updates.append(1))
    world = World(apply)
    try:
        with _quiet():
            usage.run(world)
    except PolicyError as error:
        return Cell("refused", str(error), len(updates))
    except Exception as error:  # noqa: BLE001 - whatever ends a usage is what came of it
        return Cell("fails", f"{type(error).__name__}: {error}".partition("\n")[0], len(updates))
    finally:
        counting.remove()
        for job in reversed(jobs):
            job.undo()
        torch._dynamo.reset()
    difference = find_difference(plan, expected, world.out)
    return Cell("fails", difference) if difference else Cell("passes")


@cache
def plain_outcome(usage: Usage) -> Outcome:
    """Returns what a usage leads to without a plan."""
    world = World()
    with _quiet():
        usage.run(world)
    return world.out


class _quiet(warnings.catch_warnings):  # noqa: N801 - used as a context
    """Runs with one thread and without the warnings that usages earn themselves."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.simplefilter("ignore")
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *args: object) -> None:
        torch.set_num_threads(self._threads)
        super().__exit__(*args)


def is_exact(plan: Plan) -> bool:
    """Whether a plan leaves numbers alone."""
    return all(policy.numerics == "none" for policy in plan.policies)


def tolerance_of(plan: Plan) -> float:
    """Returns how far numbers may be off, as a share of their size."""
    found = 0.0
    for policy in plan.policies:
        if isinstance(policy, Precision):
            found += 0.1
        else:
            found += TOLERANCES[policy.numerics]
    return found


def find_difference(plan: Plan, expected: Outcome, found: Outcome) -> str:
    """Says what differs from the plain run and must not; "" where nothing does."""
    for key, value in expected.facts.items():
        if key not in found.facts:
            return f"{key} is missing"
        if found.facts[key] != value:
            return f"{key}: {found.facts[key]!r} instead of {value!r}"
    tolerance = tolerance_of(plan) + expected.slack
    for key, number in expected.numbers.items():
        other = found.numbers.get(key)
        if other is None or other.shape != number.shape:
            return f"{key} is missing or of another shape"
        if is_exact(plan):
            if not torch.equal(number, other):
                return f"{key} differs by {float((number.double() - other.double()).abs().max()):.3g}"
        else:
            distance = float((number.double() - other.double()).norm())
            if not distance <= tolerance * float(number.double().norm()) + 1e-5:
                return f"{key} is off by {distance / (float(number.double().norm()) + 1e-12):.3g} of its size"
    if is_exact(plan) and not _same(expected.trail, found.trail):
        return f"trail: {found.trail} instead of {expected.trail}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)
