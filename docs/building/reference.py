"""Parts of pages that are read off the code: exit codes, machines, what each policy costs, planners and their papers.

A page says where each goes, in a comment: ``<!-- generated: machines, ... -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from docs.building.commands import ROOT
from memprof.errors import MemprofError, PolicyError
from memprof.launch.parent import target
from memprof.machines.catalogue import PRECISIONS, Accelerator, accelerators
from memprof.planners.base import planner_types
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: The value with which each policy's cost is shown, where its help has one for another job.
VALUES = {"loss": "8", "remat": "45MiB", "swap": "'layers.*:disk'", "shard": "fsdp:4", "optimizer": "in-backward"}

#: Policies whose effect no recording of the plain job on a CPU tells, and why.
UNTOLD = {
    "compile": "told by a recording of a compiled run only: `memprof record --compile`",
    "allocator": "changes reserved bytes, of which a job on a CPU has none: [allocator](allocator.md)",
}

SAMPLE = ROOT / "sample_traces" / "gpt" / "run.memprof"

_MARK = re.compile(r"^<!-- generated: ([\w ]+),.*-->$", re.MULTILINE)


def with_generated_parts(markdown: str) -> str:
    """Puts the generated parts into a page.

    Raises:
        KeyError: It names one that there is not.
    """
    return _MARK.sub(lambda mark: "\n".join(PARTS[mark[1]]()), markdown)


def exit_codes() -> Iterator[str]:
    """Yields a table of what each exit code means, by the docstrings of the errors that end with it."""
    assert target.CannotStartError in _errors(MemprofError)  # imported, so that its code is known
    codes: dict[int, list[str]] = {
        0: ["What was asked for was done."],
        1: ["An error of the system, such as a full disk."],
        130: ["Interrupted with Ctrl-C (128 + SIGINT, as shells count)."],
    }
    for kind in _errors(MemprofError):
        if kind is not MemprofError:
            meaning = (kind.__doc__ or "").strip().splitlines()[0].split(" (exit code")[0].rstrip(".")
            codes.setdefault(kind.exit_code, []).append(f"{meaning}. (`{kind.__name__}`)")
    yield from ("| code | meaning |", "|---|---|")
    for code, meanings in sorted(codes.items()):
        yield f"| {code} | {' '.join(meanings)} |"


def _errors(kind: type[MemprofError]) -> Iterator[type[MemprofError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("memprof."):
            yield from _errors(each)


def machines() -> Iterator[str]:
    """Yields the table of the catalogue's devices."""
    yield (
        "| name | memory | for tensors | capability | memory, GB/s | host, GB/s | peers, GB/s | "
        f"TFLOPS {', '.join(PRECISIONS)} |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    for one in accelerators():
        cells = (
            one.name,
            format_bytes(one.memory_bytes),
            format_bytes(one.budget_bytes),
            one.capability or "-",
            _speed(one.memory_bytes_per_us),
            _speed(one.host_bytes_per_us),
            _speed(one.peer_bytes_per_us),
            _products(one),
        )
        yield f"| {' | '.join(cells)} |"


def sources() -> Iterator[str]:
    """Yields where each device's figures are from."""
    for one in accelerators():
        usable = f"usable memory: {one.usable_source}" if one.usable_source else ""
        yield f"- **{one.name}**: {'; '.join(filter(None, (one.source, usable, one.note)))}"


def _speed(bytes_per_us: float) -> str:
    return f"{bytes_per_us / 1e3:,.0f}" if bytes_per_us else "-"


def _products(one: Accelerator) -> str:
    rates = (one.flops_per_us.get(kind) for kind in PRECISIONS)
    return " / ".join("-" if rate is None else f"{rate / 1e6:,.4g}" for rate in rates)


@dataclass(frozen=True)
class Cost:
    """What a policy does to the sample's step.

    Attributes:
        peak_bytes: Predicted peak; 0 where none is told.
        peak_change: Its change, as a share of the recorded one.
        time_change: The step's.
        why_not: Why none is told; "" where it is.
    """

    peak_bytes: int = 0
    peak_change: float = 0.0
    time_change: float = 0.0
    why_not: str = ""


@cache
def cost_of(kind: type[Policy]) -> Cost:
    """Predicts what a policy alone does to the sample GPT's step, from its shipped recording."""
    if kind.name in UNTOLD:
        return Cost(why_not=UNTOLD[kind.name])
    (value,) = shlex.split(_flag(kind))[1:]
    try:
        plan, _ = Plan((kind.from_flag(value),)).predict(Trace.open(str(SAMPLE)).fullest_step())
    except PolicyError as error:
        return Cost(why_not=f"`{_flag(kind)}` is not possible on this job. {error}")
    found = plan.prediction
    assert found is not None
    return Cost(
        found.peak_allocated_bytes,
        found.peak_allocated_bytes / found.recorded_peak_bytes - 1,
        found.step_time_us / found.recorded_step_time_us - 1,
    )


def _numerics(kind: type[Policy]) -> str:
    return kind.from_flag(kind.flag_example.strip("'")).numerics


def costs() -> Iterator[str]:
    """Yields the table of what each policy does to the sample."""
    yield "| policy | flag | peak | change | step time | numerics | how |"
    yield "|---|---|--:|--:|--:|---|---|"
    for kind in policy_types():
        cost = cost_of(kind)
        if not cost.why_not:
            yield (
                f"| {_link(kind)} | `{_flag(kind)}` | {format_bytes(cost.peak_bytes)} | {cost.peak_change:+.1%} | "
                f"{cost.time_change:+.1%} | {_numerics(kind)} | {kind.source} |"
            )


def costs_not_told() -> Iterator[str]:
    """Yields the policies that are not in the table, and why."""
    for kind in policy_types():
        if cost_of(kind).why_not:
            yield f"- {_link(kind)} (numerics: {_numerics(kind)}; how: {kind.source}): {cost_of(kind).why_not}"


def what_policies_do() -> Iterator[str]:
    """Yields what the help says of each policy's flag."""
    for kind in policy_types():
        yield f"- **{kind.name}**: {kind.flag_help[:1].lower()}{kind.flag_help[1:].rstrip('.')}."


def _link(kind: type[Policy]) -> str:
    return f"[{kind.name}](policies.md#{kind.name})"


def _flag(kind: type[Policy]) -> str:
    return f"--{kind.name} {VALUES.get(kind.name, kind.flag_example)}"


def planners() -> Iterator[str]:
    """Yields the table of planners: what each does, and the paper it is from."""
    yield from ("| `--planner` | method | source |", "|---|---|---|")
    for kind in planner_types():
        yield f"| `{kind.name}` | {kind.summary} | {kind.source} |"


#: The generated parts, by their names in pages.
PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "exit codes": exit_codes,
    "machines": machines,
    "sources": sources,
    "costs": costs,
    "costs not told": costs_not_told,
    "what policies do": what_policies_do,
    "planners": planners,
}
