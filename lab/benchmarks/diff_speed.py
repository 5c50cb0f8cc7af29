"""How long does `memprof diff` take: on two recordings of 100,000 operators, and until it starts?"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from lab.benchmarks.recording import SAMPLES, run
from lab.benchmarks.section import Section, verdict
from tests.synthetic import write_synthetic

#: Most seconds for two recordings of 100,000 operators, from the start of the process to its end.
BAR_S = 2.0
#: Most seconds for what is imported.
BAR_IMPORT_S = 0.5
_EVENTS = 200_000  # a birth and a death an operator

#: Runs memprof in this process and tells what that imported.
_RUN = """
import json, sys
from memprof.cli.main import main
status = main(sys.argv[1:])
json.dump({"status": status, "has_torch": "torch" in sys.modules}, sys.stderr)
"""


def measure(folder: Path, *, quick: bool) -> Section:
    """Times whole processes, and what they import."""
    times = 2 if quick else 7
    rows, longest = [], 0.0
    for what, layers in (("in a hundred steps", 32), ("in one step", 3300)):
        sides = [folder / f"speed-{layers}-{seed}.memprof" for seed in range(2)]
        for seed, side in enumerate(sides):
            write_synthetic(side, _EVENTS, layers=layers, seed=seed)
        took, _ = _times(["diff", *map(str, sides), "--explain"], folder, times)
        longest = max(longest, took)
        rows.append((f"100,000 operators a side, {what}", f"{took:.2f}", "", ""))
    samples = [str(SAMPLES / "gpt" / "run.memprof")] * 2
    slowest, is_torch_free = 0.0, True
    for what, words in (("memprof diff --help", ["diff", "--help"]), ("two of the sample GPT", ["diff", *samples])):
        took, has_torch = _times(words, folder, times)
        imports = statistics.median(_import_s(words, folder) for _ in range(times))
        slowest, is_torch_free = max(slowest, imports), is_torch_free and not has_torch
        rows.append((what, f"{took:.2f}", f"{imports:.2f}", "yes" if has_torch else "no"))
    return Section(
        "Diff time",
        "Medians of whole processes, from start to end; imports by Python's own count (`-X importtime`), which slows "
        "them a little.",
        ("diff", "seconds", "of them imports", "torch imported"),
        tuple(rows),
        verdict(
            f"100,000 operators within {BAR_S:.0f} s: {longest:.2f} s; imports within {BAR_IMPORT_S} s and without "
            f"torch: {slowest:.2f} s",
            passed=longest <= BAR_S and slowest <= BAR_IMPORT_S and is_torch_free,
        ),
    )


def _times(words: list[str], folder: Path, times: int) -> tuple[float, bool]:
    """Returns the median seconds of a run of memprof, and whether torch was imported."""
    taken = []
    for _ in range(times):
        started = time.monotonic()
        done = run([sys.executable, "-c", _RUN, *words], folder)
        taken.append(time.monotonic() - started)
    told = json.loads(done.stderr.decode().splitlines()[-1])
    if told["status"]:
        raise RuntimeError(f"memprof {' '.join(words)} ended with {told['status']}")
    return statistics.median(taken), bool(told["has_torch"])


def _import_s(words: list[str], folder: Path) -> float:
    """Returns the seconds that all imports of a run take together."""
    lines = run([sys.executable, "-X", "importtime", "-c", _RUN, *words], folder).stderr.decode().splitlines()
    own = [line.removeprefix("import time:").split("|")[0].strip() for line in lines if line.startswith("import time:")]
    return sum(int(us) for us in own if us.isdigit()) / 1e6
