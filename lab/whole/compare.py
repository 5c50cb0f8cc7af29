"""Compares dry runs of whole loops with recordings of every step: ``python lab/whole/compare.py [SCRIPT]...``."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memprof.analysis.report.whole_loop import LoopMoment, moments_of
from memprof.trace.store import Trace
from memprof.units import format_bytes

_MOST_STEPS = "2000"


def record(script: Path, output: Path, *options: str) -> float:
    """Records a script; returns the seconds that it took."""
    begin = time.monotonic()
    words = ["memprof", "record", "-q", "-f", "-o", str(output), *options, str(script)]
    subprocess.run(words, check=False, capture_output=True)
    return time.monotonic() - begin


def _words(one: LoopMoment) -> str:
    return f"{one.name} {format_bytes(one.moment.allocated_bytes)} (step {one.moment.step})"


def main() -> None:
    """Prints a row for each script."""
    own = Path(__file__)
    scripts = [Path(word) for word in sys.argv[1:]] or sorted(set(own.parent.glob("*.py")) - {own})
    print("case | real: highest moment | dry: highest moment | error | same | whole / plain time | skipped")
    for script in scripts:
        with tempfile.TemporaryDirectory() as folder:
            real, dry, plain = (Path(folder, name) for name in ("real.memprof", "dry.memprof", "plain.memprof"))
            record(script, real, "--skip", "0", "--steps", _MOST_STEPS)
            plain_s = record(script, plain, "--dry-run")
            whole_s = record(script, dry, "--dry-run", "--whole")
            try:
                tops = [
                    max(moments_of(Trace.open(each)), key=lambda one: one.moment.allocated_bytes)
                    for each in (real, dry)
                ]
                note = next(each for each in Trace.open(dry).manifest.notes if each.startswith("whole loop"))
            except Exception as error:  # noqa: BLE001 - the next row follows
                print(f"{script.stem} | {error}", flush=True)
                continue
        first, second = (each.moment for each in tops)
        error = second.allocated_bytes / first.allocated_bytes - 1
        is_same = (first.phase, first.step) == (second.phase, second.step)
        print(
            f"{script.stem} | {_words(tops[0])} | {_words(tops[1])} | {error:+.2%} | {is_same} | "
            f"{whole_s:.1f} / {plain_s:.1f} s | {note}",
            flush=True,
        )


if __name__ == "__main__":
    main()
