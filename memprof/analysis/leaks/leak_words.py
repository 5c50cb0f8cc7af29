"""A report of leaks in sentences."""

from __future__ import annotations

from memprof.analysis.leaks.leak import HeldBy, Leak
from memprof.analysis.leaks.leaks import LeakReport
from memprof.units import format_bytes

_KINDS = {
    "closure": "a closure",
    "exception": "an exception's traceback",
    "cache": "a cache",
    "optimizer": "an optimizer",
}


def describe_growth(report: LeakReport) -> str:
    """Returns the verdict in one sentence."""
    growth = report.growth
    if growth.bytes_per_step is None:
        return f"Cannot determine whether memory grows: {growth.why_unknown}"
    steps = f"steps {growth.first_step} to {growth.last_step}"
    if not growth.bytes_per_step:
        return f"Memory does not grow from step to step ({steps})."
    return f"Memory grows by {format_bytes(growth.bytes_per_step)} a step ({steps})."


def describe_leak(leak: Leak) -> str:
    """Returns one sentence on tensors that stay: their growth, age, holder and origin."""
    since = "" if leak.since_step is None else f"; kept since step {leak.since_step}"
    by = "" if leak.held_by is None else f" by {describe_holder(leak.held_by)}"
    kept = since + by if since else by and f"; kept{by}"
    return f"{format_bytes(leak.bytes_per_step)} a step{kept}{describe_origin(leak)}"


def describe_origin(leak: Leak) -> str:
    """Returns what a leak's tensors are and where they are made, behind a comma."""
    what = " ".join(part for part in (leak.category.replace("_", " "), leak.shape, leak.dtype) if part)
    module = f" of {leak.module}" if leak.module else ""
    line = f" at {leak.line}" if leak.line else ""
    return f", {what}" + (f", made{line} by {leak.op}{module}" if leak.op else "")


def describe_holder(held: HeldBy) -> str:
    """Returns what holds a tensor: ``losses[0]`` (list) in train.py:8."""
    if not held.chain:
        return "something outside Python's references"
    graph = "the autograd graph of " if held.is_by_graph else ""
    through = f", through {_KINDS[held.kind]}" if held.kind in _KINDS else ""
    if held.kind == "cycle":
        through = ", in a reference cycle, which only Python's garbage collector frees"
    place = f" in {held.place}" if held.place else ""
    return f"{graph}`{held.chain}` ({held.container}){place}{through}"
