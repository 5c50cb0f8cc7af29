"""How far are proposed plans from the best that a long search of the same policies finds?"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from lab.benchmarks.recording import JOBS, ONE_THREAD, Job, peak_bytes, run
from lab.benchmarks.section import Bar, Section
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Effects, changed_at_random, find_options
from memprof.planners.search.explore import explore
from memprof.planners.search.groups import around
from memprof.planners.search.measure import measure_effects
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.plan.patterns import match_modules
from memprof.policies.registry import default_policies, policy_types
from memprof.trace.schema import Ints
from memprof.trace.step import Step
from memprof.trace.store import Trace

SCRIPT = JOBS / "searched.py"
#: Jobs: model, scale, and the virtual card, "" for this machine.
CASES = (
    ("gpt", 1, ""),
    ("vit", 1, ""),
    ("resnet", 2, ""),
    ("unet", 1, ""),
    ("gpt", 6, "a100-40g"),
    ("moe", 4, "rtx4090"),
    ("lora", 6, "rtx4090"),
    ("translator", 4, "l4"),
    ("unet", 4, "rtx4090"),
)
#: Time of the long search for each budget.
SEARCH_S = 20.0
SHARES = (0.8, 0.6, 0.45)
#: Most points of the step time by which a proposed plan may be slower.
BAR = 0.5
#: Largest difference between budgets one per cent of the peak apart, in points, and where they are tried.
CLIFF, STEPS = 2.0, range(72, 57, -1)


def measure(folder: Path, *, quick: bool) -> Section:
    """Records each job, asks for plans, then improves them by replays alone for a while."""
    seconds = 10.0 if quick else SEARCH_S
    rows, worst, steepest = [], 0.0, 0.0
    for model, scale, device in CASES[:2] if quick else CASES:
        step = _recorded(folder, model, scale, device)
        cells = []
        for share in SHARES:
            regret, cell = _regret(step, share, seconds)
            worst = max(worst, regret)
            cells.append(cell)
        cliff = _steepest(step)
        steepest = max(steepest, cliff)
        rows.append((f"{model}, {device or 'CPU'}", f"{len(step.ops):,}", *cells, f"{cliff:.1f}"))
    return Section(
        "Regret of proposed plans",
        "Predicted step time of `suggest`'s best plan over the recorded step, per cent, and in brackets the points by "
        f"which {seconds:.0f} s of random changes to it and two other plans improve it. steepest: the largest "
        "difference between two budgets 1 % of the peak apart, from 72 to 58 %.",
        ("job", "operators", *(f"{share:.0%}" for share in SHARES), "steepest"),
        rows,
        Bar(
            f"regret at most {BAR} points, no difference above {CLIFF:.0f} points",
            f"{worst:.2f}; {steepest:.1f}",
            passed=worst <= BAR and steepest <= CLIFF,
        ),
    )


def _recorded(folder: Path, model: str, scale: int, device: str) -> Step:
    path = folder / f"searched-{model}-{scale}-{device or 'cpu'}.memprof"
    job = Job(SCRIPT, (model, "--scale", str(scale), *(("--device", "cuda") if device else ())))
    if device:
        run(job.followed(path, "--dry-run", "--device", device), folder)
    else:
        run(job.recorded(path, steps=1), folder, **ONE_THREAD)
    return Trace.open(path).fullest_step()


def _regret(step: Step, share: float, seconds: float) -> tuple[float, str]:
    """Returns the points of the step time that a long search gains, and the cell that says so."""
    found = explore(step, SearchRequest(int(peak_bytes(step) * share), time_limit_s=600.0))
    if found.best is None:
        return 0.0, "-"
    best = min((_improved(step, one, found.search_request, seconds) for one in _starts(found.fitting)), key=rank)
    regret = 100 * (found.best.step_time_us - best.step_time_us) / step.duration_us
    return regret, f"{100 * (found.best.step_time_us / step.duration_us - 1):+.1f} ({regret:.2f})"


def _starts(fitting: tuple[Candidate, ...]) -> Iterator[Candidate]:
    """Yields the fastest plans of different combinations of whole-step policies, three at most."""
    seen: set[tuple[Policy, ...]] = set()
    for one in fitting:
        frame = _frame(one.policies)
        if frame not in seen and len(seen) < 3:
            seen.add(frame)
            yield one


def _frame(policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    return tuple(policy for policy in policies if not _chooses(policy))


def _chooses(policy: Policy) -> bool:
    return hasattr(policy, "modules") and getattr(policy, "what", "activations") == "activations"


def _improved(step: Step, start: Candidate, request: SearchRequest, seconds: float) -> Candidate:
    """Changes single choices at random, and keeps what is faster and fits."""
    bench = Workbench(step, deadline=time.monotonic() + 10 * seconds)
    bench.try_plan()
    frame = _frame(start.policies)
    kinds = [kind for kind in policy_types() if kind.name in default_policies()]
    effects = measure_effects(bench, frame, find_options(step, kinds))
    if effects is None:
        return start
    draw, best, chosen = random.Random(0), start, _columns(effects, start.policies)
    ends = time.monotonic() + seconds / 3
    while time.monotonic() < ends:
        changed = changed_at_random(effects, chosen, draw)
        found = bench.try_plan(*frame, *effects.policies(changed))
        if found is not None and request.needed(found) <= request.budget_bytes and rank(found) < rank(best):
            best, chosen = found, changed
    return best


def _columns(effects: Effects, policies: tuple[Policy, ...]) -> Ints:
    """Returns the columns whose choices a plan makes, where it makes them as whole modules."""
    names = dict.fromkeys(effects.modules)
    made: dict[str, set[tuple[type[Policy], object]]] = {name: set() for name in names}
    for policy in filter(_chooses, policies):
        for name in match_modules(getattr(policy, "modules", ()), names):
            made[name].add(_setting(policy))
    found: list[int] = []
    for column, name in enumerate(effects.modules):
        offered = {_setting(policy) for policy in effects.options[effects.option_of[column]].policies}
        if offered == made[name] and not any(name in around(effects.modules[other]) for other in found):
            found.append(column)
    return np.array(sorted(found), dtype=np.int64)


def _setting(policy: Policy) -> tuple[type[Policy], object]:
    return type(policy), getattr(policy, "keep", ())


def _steepest(step: Step) -> float:
    """Returns the largest difference in time between two budgets one per cent of the peak apart, in points."""
    peak, times = peak_bytes(step), []
    for percent in STEPS:
        found = explore(step, SearchRequest(peak * percent // 100, time_limit_s=600.0))
        if found.best is None:
            break
        times.append(100 * found.best.step_time_us / step.duration_us)
    return max((after - before for before, after in pairwise(times)), default=0.0)
