"""Results of each planner, stored in golden.json; ``.venv/bin/python -m tests.planners.golden`` rewrites that file."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from pathlib import Path

from memprof.planners.base import ScheduleRequest, named_planner, planner_types
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.schedule import replay
from memprof.planners.published.auto import Auto
from tests.planners import graphs
from tests.planners.promises import peak_bytes, step_named

PATH = Path(__file__).with_name("golden.json")
UPDATE = ".venv/bin/python -m tests.planners.golden"

#: Small enough for the planners that solve a mixed-integer program, alone or among others.
_SMALL = {
    "small uneven chain": lambda: graphs.uneven_chain(8, seed=3),
    "small unet": lambda: graphs.unet(2),
    "small random": lambda: graphs.random_graph(8, seed=11),
}
SOLVED = ("checkmate", "auto")
_SLOW = (*SOLVED, "chain")

#: Steps, budgets as shares of the recorded peak, and the planners that take too long there.
_CASES: dict[str, tuple[tuple[float, ...], tuple[str, ...]]] = {
    "gpt": ((0.7,), _SLOW),
    "resnet": ((0.6,), SOLVED),
    "lstm": ((0.8, 0.1), SOLVED),
    "uneven chain": ((0.8, 0.5, 0.1), SOLVED),
    "unet": ((0.8, 0.6), SOLVED),
    "residual": ((0.7, 0.1), SOLVED),
    "random": ((0.8, 0.1), SOLVED),
    **dict.fromkeys(_SMALL, ((0.8, 0.6, 0.1), ())),
}

Figures = dict[str, str | int | float]


def cases() -> list[tuple[str, str]]:
    """Returns each step with each planner that is quick on it."""
    return [
        (step, kind.name) for step, (_, slow) in _CASES.items() for kind in planner_types() if kind.name not in slow
    ]


def reached(step: str, planner: str) -> dict[str, Figures]:
    """Returns a planner's result for each budget of a step.

    Each result has the status, and with a schedule its replayed peak and its overhead, waits for copies included, as a
    share of the step time; without one, the smallest budget that the planner can meet. The deadline is far away:
    results must not depend on the machine's speed.
    """
    return {f"{share:.0%}": _answer(graph_named(step), planner, share) for share in _CASES[step][0]}


def differences(known: Figures, found: Figures, planner: str) -> list[str]:
    """Returns the differences from the stored results, and whether each is an improvement.

    Equally good solutions of a mixed-integer program may differ in their peak, which is not compared for them.
    """
    exact = 1e-6 if planner in SOLVED else 1e-9
    lines = []
    for name in sorted({*known, *found}):
        before, after = known.get(name), found.get(name)
        if isinstance(before, int | float) and isinstance(after, int | float):
            if (name == "peak_bytes" and planner in SOLVED) or math.isclose(
                before, after, rel_tol=exact, abs_tol=exact
            ):
                continue
            lines.append(f"{name} was {before:,}, is {after:,}: {'better' if after < before else 'worse'}")
        elif before != after:
            lines.append(f"{name} was {before}, is {after}")
    return lines


@cache
def graph_named(step: str) -> Graph:
    """Returns the graph of a step, read or built once."""
    return graph_of(_SMALL[step]() if step in _SMALL else step_named(step))


def _answer(graph: Graph, planner: str, share: float) -> Figures:
    peak = peak_bytes(graph)
    # A link that moves half of the peak while the step runs: copies have to be waited for.
    link = peak / graph.duration_us / 2 if planner == "swap" else 0.0
    request = ScheduleRequest(graph, int(peak * share), deadline=time.monotonic() + 600, link_bytes_per_us=link)
    kind = named_planner(planner)()
    if isinstance(kind, Auto):
        kind.most_moves = 0  # the deadline is far away
    found = kind.search(request)
    if found.runs is None:
        return {"status": found.status, "least_bytes": int(found.least_bytes)}
    done = replay(graph, found.runs, found.moves)
    extra = (done.extra_us + done.stall_us) / graph.duration_us
    return {"status": found.status, "peak_bytes": int(done.peak_bytes), "extra_time": round(extra, 12)}


def main() -> None:
    """Writes the file, one answer a line."""
    lines: dict[str, list[str]] = {}
    for step, planner in cases():
        for share, figures in reached(step, planner).items():
            lines.setdefault(f"{step}, {planner}", []).append(f"    {json.dumps(share)}: {json.dumps(figures)}")
    texts = [f"  {json.dumps(name)}: {{\n" + ",\n".join(answers) + "\n  }" for name, answers in lines.items()]
    PATH.write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main()
