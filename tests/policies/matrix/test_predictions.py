"""A prediction is refused where the run is, in the same sentence, if the recording says why; a search skips it."""

from __future__ import annotations

import gc
import math
import re
import warnings
from pathlib import Path

import pytest

import memprof
from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.predict import forecast
from memprof.errors import PolicyError
from memprof.planners.search.workbench import Workbench, find_frames
from memprof.policies.optimizer.policy import DISTRIBUTED
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from memprof.trace.store import Trace
from tests.policies.matrix.catalog import usages
from tests.policies.matrix.cells import run_cell, single_plans
from tests.policies.matrix.expected import REFUSALS, key_of
from tests.policies.matrix.world import World

#: One plan of each kind that refuses something.
PLANS = {key_of(plan.policies[0]): plan for plan in reversed(single_plans()) if key_of(plan.policies[0]) in REFUSALS}
USAGES = {usage.name: usage for usage in usages()}

#: Refused by what a recording says, without a dry run; any other cell of a policy that changes kernels takes one
#: (test_dry_runs.py), and a lifetime policy is refused by its prediction alone.
SHOWN = [
    ("accumulate", "hooks_after_a_gradient_made_before"),
    ("accumulate", "lbfgs"),
    ("checkpoint", "spectral_norm"),
    ("optimizer", "lbfgs"),
    ("optimizer in-backward", "accumulation_of_the_jobs_own"),
    ("optimizer in-backward", "clipping_by_hand"),
    ("optimizer in-backward", "distributed_afterwards"),
    ("optimizer in-backward", "gradients_read"),
    ("optimizer in-backward", "lbfgs"),
    ("optimizer in-backward", "rate_set_by_hand"),
    ("precision fp16", "lbfgs"),
    ("swap optimizer", "lbfgs"),
]
#: What happens outside the recorded steps, or depends on numbers, of which a dry run has none.
RUN_ALONE = (
    "a_step_left_after_backward",
    "a_gradient_that_is_not_finite",
    "another_kind_of_optimizer_in_the_middle",
)
#: Refused with another sentence in a run of a script, in which the model is wrapped when the plan is applied.
AS_A_SCRIPT = {("optimizer in-backward", "distributed_afterwards"): DISTRIBUTED}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Trace]:
    """Records what a script does with a model, for each test that runs; first, as plans leave models alive."""
    folder = tmp_path_factory.mktemp("usages")
    chosen = {
        item.callspec.params["usage"]
        for item in request.session.items
        if getattr(item, "module", None) is request.module and hasattr(item, "callspec")
    }
    traces = {}
    for usage in sorted(chosen):
        path = folder / f"{usage}.memprof"
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with memprof.record(path):
                USAGES[usage].run(World())
        traces[usage] = Trace.open(path)
    return traces


def refusal(trace: Trace, plan: Plan) -> str:
    """Predicts a plan; returns the sentence with which that is refused, "" where it is not."""
    try:
        forecast(trace, plan, basis_of(trace))
    except PolicyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("policy", "usage"), SHOWN)
def test_a_prediction_is_refused_as_the_run(recorded: dict[str, Trace], policy: str, usage: str) -> None:
    """Word for word, where a recording says what the run refuses; a search does not propose the policy."""
    trace = recorded[usage]
    real = AS_A_SCRIPT.get((policy, usage), run_cell(PLANS[policy], USAGES[usage]).sentence)
    assert real
    # A parametrization is called before it is in its model, and counts as a second one: names begin with the type.
    assert refusal(trace, PLANS[policy]).removeprefix("Net.") == real
    bench = Workbench(basis_of(trace).step, deadline=math.inf)
    bench.try_plan()
    frames = find_frames(bench, {kind.name for kind in policy_types()})
    assert policy not in {key_of(each) for frame in frames for each in frame}


def test_every_refusal_of_a_lifetime_policy_is_predicted() -> None:
    """No dry run shows it to a user of a recording alone."""
    cells = [(policy, usage) for policy, entries in REFUSALS.items() for usage in entries]
    assert {cell for cell in cells if not PLANS[cell[0]].policies[0].changes_kernels} <= set(SHOWN)


def test_cells_that_only_a_run_shows_are_documented() -> None:
    """docs/safety.md names each usage that neither a prediction nor a dry run refuses."""
    page = (Path(__file__).parents[3] / "docs" / "safety.md").read_text()
    for usage in RUN_ALONE:
        assert re.split("[,;]", USAGES[usage].title)[0] in page
