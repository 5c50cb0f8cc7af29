"""Savings and overhead of swapping to the host, compared with torch's save_on_cpu and with recomputation."""

from __future__ import annotations

import json
import statistics
import sys

from lab.gpu.runs import JOBS, run, side_by_side
from lab.gpu.section import Found, Place
from memprof.units import format_bytes

TITLE = "Swap to the host"
HOW = (
    "A GPT under bf16 autocast; what its layers save goes to pinned host memory and comes back, is made again, or "
    "stays. save_on_cpu is torch's, with pinned memory, around the same layers: it waits for every copy. Peaks are "
    "torch's own; times are medians behind the first steps, the recorder is not there."
)
COLUMNS = ("saved tensors", "peak", "ratio", "ms a step", "ratio", "tokens a second", "same losses")
_WARM_UP = 3


#: Ways of dealing with what is saved: how the table names each, and the job's arguments.
WAYS = {
    "plain": ("stay", ("--how", "plain")),
    "save_on_cpu": ("torch's save_on_cpu(pin_memory=True)", ("--how", "save_on_cpu")),
    "recompute": ("memprof: checkpoint", ("--how", "recompute")),
    "swap": ("memprof: swap, prefetch 1", ("--how", "swap")),
    "swap 4": ("memprof: swap, prefetch 4", ("--how", "swap", "--prefetch", "4")),
    "swap 0": ("memprof: swap, waiting for every copy", ("--how", "swap", "--prefetch", "0")),
}


def measure(place: Place, found: Found) -> None:
    """Trains under each."""
    ways = ("plain", "save_on_cpu", "swap") if place.is_rehearsal else WAYS
    items = [(WAYS[key][0], key) for key in ways]
    results = dict(side_by_side(place, found, items, lambda key: _run(place, WAYS[key][1])))
    plain = results.get("plain")
    figures = {}
    for key, result in results.items():
        us = statistics.median(step["us"] for step in result["steps"][_WARM_UP:])
        peak = max(step["allocated_bytes"] for step in result["steps"][_WARM_UP:])
        losses = [step["loss"] for step in result["steps"]]
        same = plain is not None and losses == [step["loss"] for step in plain["steps"]]
        figures[key] = {"step_us": us, "peak_bytes": peak, "tokens_per_s": result["tokens"] / us * 1e6, "same": same}
    base = figures.get("plain")
    for key, one in figures.items():
        found.add(
            (
                WAYS[key][0],
                format_bytes(one["peak_bytes"]) if one["peak_bytes"] else "",
                f"{one['peak_bytes'] / base['peak_bytes']:.2f}" if base and base["peak_bytes"] else "",
                f"{one['step_us'] / 1e3:.1f}",
                f"{one['step_us'] / base['step_us']:.2f}" if base else "",
                f"{one['tokens_per_s']:,.0f}",
                "yes" if one["same"] else "no",
            ),
            way=key,
            **one,
        )
    if {"plain", "swap", "save_on_cpu"} <= figures.keys():
        swap, rival = figures["swap"], figures["save_on_cpu"]
        text = f"swap faster than save_on_cpu: {swap['tokens_per_s'] / rival['tokens_per_s']:.2f} times its throughput"
        found.bar(text, place.judged(swap["tokens_per_s"] > rival["tokens_per_s"]))
        found.bar("swap lowers the peak", place.judged(swap["peak_bytes"] < figures["plain"]["peak_bytes"]))
        found.bar("the losses are those of the plain run, to the bit", all(one["same"] for one in figures.values()))


def _run(place: Place, arguments: tuple[str, ...]) -> dict[str, object]:
    size = ("tiny", "4", "5") if place.is_rehearsal else ("small", "8", "10")
    words = ["--device", place.device, "--gate", str(place.folder("work") / "gate")]
    words += [word for pair in zip(("--size", "--batch", "--steps"), size, strict=True) for word in pair]
    # The job applies memprof's policies itself.
    command = [sys.executable, str(JOBS / "swapped.py"), *words, *arguments]
    printed, _ = run(place, command, has_memprof=True, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    return json.loads(printed.splitlines()[-1])
