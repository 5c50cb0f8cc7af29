"""How the time of each verb grows with the recording: seconds and memory at 0.1, 1 and 10 million events.

python -m lab.benchmarks.verb_growth  # exits with 1 where a verb's exponent is above the bar
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from lab.benchmarks.recording import measure_program
from lab.benchmarks.section import Bar, Section
from tests.synthetic import write_synthetic

#: Allocations and frees of the recordings.
_EVENTS = (100_000, 1_000_000, 10_000_000)
#: Largest exponent of growth of the processor time, without imports, from the second largest recording to the largest.
_MOST = 1.1
#: What is loaded for every recording alike, and is not timed.
_BEFORE = "from memprof.cli.main import main\nmain(['report', 'warm.memprof'])"
_VERBS = {
    "report": ("report", "large.memprof"),
    "report --leaks": ("report", "--leaks", "large.memprof"),
    "report --allocator": ("report", "--allocator", "large.memprof"),
    "diff": ("diff", "large.memprof", "large.memprof"),
    "diff --fail-on": ("diff", "--fail-on", "peak>1TiB", "large.memprof"),
    "suggest": ("suggest", "--no-run", "--budget", "70%", "large.memprof"),
    "export --to summary": ("export", "--to", "summary", "-o", "large.json", "large.memprof"),
    "export --to perfetto": ("export", "-f", "--to", "perfetto", "-o", "large.json", "large.memprof"),
    "export --to snapshot": ("export", "-f", "--to", "snapshot", "-o", "large.pickle", "large.memprof"),
}


def verb_growth(folder: Path, *, quick: bool) -> Section:
    """Times each verb on synthetic recordings of three sizes, in a process each."""
    events = _EVENTS[:2] if quick else _EVENTS
    write_synthetic(folder / "warm.memprof", 10_000)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in _VERBS}
    for size in events:
        write_synthetic(folder / "large.memprof", size)
        for name, words in _VERBS.items():
            program = f"assert main({list(words)!r}) in (0, 3, 4)"
            runs = [
                measure_program(program, folder, before=_BEFORE, clock="process_time")
                for _ in range(2 if size < 5_000_000 else 1)
            ]
            figures[name].append(min(runs))
    rows, highest = [], 0.0
    for name, found in figures.items():
        (last_s, _), (before_s, _) = found[-1], found[-2]
        exponent = math.log(last_s / before_s) / math.log(events[-1] / events[-2])
        highest = max(highest, exponent)
        cells = [cell for seconds, peak in found for cell in (f"{seconds:.2f}", f"{peak / 1e6:,.0f}")]
        rows.append((f"memprof {name}", *cells, f"{exponent:.2f}"))
    columns = [column for size in events for column in (f"{size:,}: s", "MB")]
    return Section(
        "Growth with the recording",
        "Synthetic recordings of so many allocations and frees: processor time without imports, the better of two "
        "runs, and peak resident memory; the exponent is that of the last step.",
        ("verb", *columns, "exponent"),
        rows,
        Bar(f"exponents of {_MOST} at most", f"{highest:.2f}", passed=highest <= _MOST),
    )


def main() -> None:
    """Prints the figures."""
    with tempfile.TemporaryDirectory(prefix="memprof-growth-") as folder:
        section = verb_growth(Path(folder), quick="--quick" in sys.argv)
    Console(width=160).print(section.table())
    sys.exit(0 if section.bar and section.bar.passed else 1)


if __name__ == "__main__":
    main()
