"""Records every sample of a CPU again and writes down the figures its trace must show.

python sample_traces/make.py [gpt] [resnet] [lstm]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: Recorded on a GPU, by `make gpu`.
ON_A_GPU = ("gpt-h200",)


def make(folder: Path) -> dict[str, Any]:
    """Records the sample in a folder and returns its expected figures.

    A trace holds the paths of the script and of torch, so both are reached by a path that is the same everywhere.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    neutral = Path(tempfile.gettempdir()) / "memprof-samples"
    shutil.rmtree(neutral, ignore_errors=True)
    place = neutral / folder.name
    place.mkdir(parents=True)
    try:
        (neutral / "venv").symlink_to(sys.prefix)
        shutil.copy(folder / "train.py", place)
        memprof = [str(neutral / "venv" / "bin" / "python"), "-m", "memprof.cli.main"]
        subprocess.run([*memprof, "record", "-o", "run.memprof", "train.py"], cwd=place, env=environment, check=True)
        report = subprocess.run(
            [*memprof, "report", "--json", "run.memprof"], cwd=place, check=True, capture_output=True, text=True
        )
        summary = ["export", "run.memprof", "--to", "summary", "-o", "memory.json"]
        subprocess.run([*memprof, *summary], cwd=place, check=True)
        for name in ("run.memprof", "memory.json"):  # the second is the baseline of the project's own memory gate
            shutil.move(place / name, folder / name)
    finally:
        shutil.rmtree(neutral)
    return expected(json.loads(report.stdout), folder / "run.memprof")


def expected(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """Picks the figures that another reading of the same trace must show again."""
    from memprof.trace.store import Trace

    trace = Trace.open(path)
    peak = report["peak"]
    return {
        "peak": {key: peak[key] for key in ("step", "phase", "op", "module", "source", "allocated_bytes")},
        "by_category": report["at_peak"]["by_category"],
        "operators": {str(number): len(trace.step(number).ops) for number in trace.recorded_steps},
    }


def main() -> None:
    """Makes the samples named on the command line, or all."""
    names = sys.argv[1:] or sorted({script.parent.name for script in HERE.glob("*/train.py")} - {*ON_A_GPU})
    for name in names:
        figures = make(HERE / name)
        (HERE / name / "expected.json").write_text(json.dumps(figures, indent=2) + "\n")
        print(f"{name}: {(HERE / name / 'run.memprof').stat().st_size:,} bytes, {figures['peak']}")


if __name__ == "__main__":
    main()
