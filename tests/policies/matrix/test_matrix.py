"""Every policy, with every use of a model in scripts: it works as without a plan, or is refused with a message."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from tests.policies.matrix.catalog import Usage, usages
from tests.policies.matrix.cells import Cell, examples, pair_plans, run_cell, single_plans, title_of
from tests.policies.matrix.expected import (
    LATE,
    WAYS_OUT,
    expected_refusals,
    key_of,
    limitation,
)

#: One worker runs the plain usages once, for all plans.
pytestmark = pytest.mark.xdist_group("tests/policies/matrix")

SINGLE, PAIRS = single_plans(), pair_plans()
#: The first of the settings that refuse alike; the others take long to say the same.
FIRST = {key_of(plan.policies[0]): plan for plan in reversed(SINGLE)}
FAST = [usage for usage in usages() if not usage.is_slow]
SLOW = [usage for usage in usages() if usage.is_slow]


@pytest.fixture(autouse=True)
def _hide_what_other_plans_left() -> None:
    """Policies look for models and loaders among all objects that are alive: those of earlier plans are not meant."""
    gc.collect()
    gc.freeze()


def problem_with(plan: Plan, usage: Usage, cell: Cell) -> str:
    """Says what is wrong with a cell, "" where nothing is."""
    why = limitation(plan, usage.name)
    if why:
        return (
            f"works, though a limitation is noted: {why}" if cell.state == "passes" and len(plan.policies) == 1 else ""
        )
    patterns = expected_refusals(plan, usage.name)
    if cell.state == "passes":
        return f"is not refused: {patterns}" if patterns and len(plan.policies) == 1 else ""
    if cell.state == "fails" or not any(re.search(pattern, cell.sentence) for pattern in patterns):
        return f"{cell.state}: {cell.sentence}"
    if not cell.sentence.endswith(".") or not WAYS_OUT.search(cell.sentence):
        return f"is refused without a way out: {cell.sentence}"
    if cell.updates and usage.name not in LATE:
        return f"is refused after {cell.updates} updates: {cell.sentence}"
    return ""


def problems_of(plan: Plan, chosen: list[Usage]) -> list[str]:
    """Runs usages under a plan and lists what is wrong."""
    found = []
    for usage in chosen:
        problem = problem_with(plan, usage, run_cell(plan, usage))
        if problem:
            found.append(f"{title_of(plan)}, {usage.name}: {problem}")
    return found


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[] if plan in FIRST.values() else pytest.mark.slow) for plan in SINGLE],
    ids=title_of,
)
def test_every_usage_works_under_a_policy_or_is_refused(plan: Plan) -> None:
    """Numbers, names, copies and files are those of the plain run; refusals are expected ones, with a remedy.

    Compiled modules run eagerly here: a plan wraps them in the same way.
    """
    with torch.compiler.set_stance("force_eager" if plan.policies[0].name == "compile" else "default"):
        assert problems_of(plan, FAST) == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", SINGLE, ids=title_of)
def test_usages_that_take_long(plan: Plan) -> None:
    """What compiles or exports the model afterwards, too."""
    assert problems_of(plan, SLOW) == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", PAIRS, ids=title_of)
def test_every_usage_works_under_two_policies_or_is_refused(plan: Plan) -> None:
    """Two policies together refuse what one of them does, or one another at once, and nothing else."""
    has_compiler = any(policy.name == "compile" for policy in plan.policies)
    with torch.compiler.set_stance("force_eager" if has_compiler else "default"):
        first = run_cell(plan, next(usage for usage in FAST if usage.name == "plain_training"))
        if first.state == "refused":
            assert first.updates == 0
            assert WAYS_OUT.search(first.sentence), first.sentence
            return
        assert problems_of(plan, FAST) == []


@pytest.mark.parametrize("kind", policy_types(), ids=lambda kind: kind.name)
def test_every_policy_of_the_registry_is_in_the_matrix(kind: type) -> None:
    """A new policy has an example that applies to the small model on a CPU."""
    assert examples(kind), f"policy {kind.name} has no example for the matrix"
