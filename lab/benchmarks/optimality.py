"""How far is auto from the optimal time, where an exact solver proves it?"""

from __future__ import annotations

import statistics
from pathlib import Path

from lab.benchmarks.section import Section, verdict
from memprof.analysis.plans.compare_planners import SHARES
from memprof.planners.find import find_plan
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.planners.graphs import random_graph, residual, unet, uneven_chain

#: Most of the exact solution's time that auto may take on top, in per cent.
BAR = 1.0
_EXACT_S, _AUTO_S = 60.0, 20.0


def measure(folder: Path, *, quick: bool) -> Section:
    """Asks checkmate for the least time and auto for its own, on graphs of at most 60 operators."""
    rows, every = [], []
    for name, steps in _families(quick=quick).items():
        excesses, asked, unproved = [], 0, 0
        for step in steps:
            peak = int(live_bytes(step).during.max())
            for share in SHARES[::3] if quick else SHARES:
                asked += 1
                budget = int(share * peak)
                exact = find_plan(step, budget, planner="checkmate", time_limit_s=5.0 if quick else _EXACT_S)
                if exact.status == "infeasible":
                    continue
                found = find_plan(step, budget, time_limit_s=_AUTO_S)
                if exact.status != "optimal":
                    unproved += 1
                    continue
                excesses.append(100 * (found.schedule_time_us / exact.schedule_time_us - 1))
        every += excesses
        largest = max(len(step.ops) for step in steps)
        rows.append(
            (
                name,
                f"{len(steps)}, up to {largest} operators",
                f"{len(excesses)} of {asked}",
                f"{unproved}",
                f"{statistics.fmean(excesses):.2f} %" if excesses else "",
                f"{max(excesses):.2f} %" if excesses else "",
            )
        )
    worst = max(every, default=float("nan"))
    return Section(
        "Optimality gap of auto",
        "Budgets of 90 to 30 % of the peak. The optimum is that of Checkmate's integer program, solved on the same "
        f"graph with HiGHS for {_EXACT_S:.0f} s at most; a case counts where it was proved. The remaining cases were "
        "proved infeasible.",
        ("graphs", "number", "proved", "not proved in time", "mean excess of time", "largest"),
        tuple(rows),
        verdict(f"auto within {BAR:.0f} % of the proved optimum: largest excess {worst:.2f} %", passed=worst <= BAR),
    )


def _families(*, quick: bool) -> dict[str, list[Step]]:
    seeds = range(1 if quick else 3)
    return {
        "uneven chains": [uneven_chain(layers, seed) for layers, seed in zip((10, 20, 30), seeds, strict=False)],
        "U-Nets": [unet(depth) for depth in ((2,) if quick else (2, 3, 4))],
        "residual networks": [residual(blocks) for blocks in ((2,) if quick else (2, 3, 4))],
        "random graphs": [random_graph(count, seed) for count, seed in zip((10, 20, 30), seeds, strict=False)],
    }
