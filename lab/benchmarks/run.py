"""Measures every published figure of memprof, prints them, and rewrites their tables in docs/benchmarks.md and others.

python lab/benchmarks/run.py [--quick] [--only NAME]... [--no-write] [--unseen FOLDER]
    [--job NAME]... [--results FOLDER]

With --only, the other tables of the pages are unchanged; each table states when it was measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # so that lab.* is found however this file is started

from rich.console import Console  # noqa: E402 - needs the path above

from lab.benchmarks.section import Section, describe_machine, write_pages  # noqa: E402

#: The benchmarks in the order of their tables, and where each is: a function of its name, or ``measure`` of its module.
BENCHMARKS = {
    "peak_exactness": "samples",
    "dry_run": "dry_runs",
    "compiled": "compiled",
    "compiled_time": "compiled",
    "snapshot_plans": "dry_runs",
    "published_peaks": "published_peaks",
    "blind_peaks": "blind_peaks",
    "real_gpus": "real_gpus",
    "unknown_share": "samples",
    "recording_cost": "overhead",
    "after_window": "overhead",
    "light_cost": "overhead",
    "fidelity": "samples",
    "kills": "samples",
    "trace_size": "samples",
    "report_start": "starting",
    "verb_start": "starting",
    "two_faces": "plans",
    "swap_disk": "overhead",
    "remat": "remat",
    "sharding": "plans",
    "transform_speed": "transform_speed",
    "planners": "searches",
    "optimality": "searches",
    "fits": "plans",
    "unseen": "unseen",
    "rivals": "rivals",
    "search_time": "searches",
    "regret": "regret",
    "planted_changes": "planted_changes",
    "diff_speed": "starting",
    "import_speed": "large",
    "large_recording": "large",
    "verb_growth": "verb_growth",
    "allocator_replay": "allocator",
    "static_planning": "allocator",
    "hard_placements": "allocator",
    "estimates": "estimates",
    "arrangements": "dry_runs",
    "dashboard_scale": "dashboard_scale",
    "ranks": "large",
}


def main() -> None:
    """Runs the selected benchmarks."""
    parser = argparse.ArgumentParser(description="Measures the figures of docs/benchmarks.md on this machine.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that everything works")
    parser.add_argument("--only", action="append", choices=tuple(BENCHMARKS), help="run this one (repeatable)")
    parser.add_argument("--no-write", action="store_true", help="leave the pages as they are")
    parser.add_argument(
        "--unseen", type=Path, metavar="FOLDER", help="checkouts of the scripts by others, as owner+name"
    )
    parser.add_argument("--job", action="append", default=[], help="of the unseen jobs, run this one (repeatable)")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="keep the outcomes of each unseen job here, and go on from them"
    )
    args = parser.parse_args()
    if args.unseen:
        os.environ["UNSEEN_CHECKOUTS"] = str(args.unseen.resolve())
    if args.results:
        os.environ["UNSEEN_RESULTS"] = str(args.results.resolve())
    if args.job:
        os.environ["UNSEEN_JOBS"] = ",".join(args.job)
    console, sections = Console(), []
    console.print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="memprof-benchmarks-") as folder:
        for name in args.only or BENCHMARKS:
            start = time.monotonic()
            module = importlib.import_module(f"lab.benchmarks.{BENCHMARKS[name]}")
            measure = module.measure if BENCHMARKS[name] == name else getattr(module, name)
            section: Section = measure(Path(folder), quick=args.quick)
            sections.append(section)
            console.print(section.table())
            console.print(f"({name}: {time.monotonic() - start:.0f} s)\n")
    if not (args.no_write or args.quick):
        write_pages(sections)
        console.print(f"Written to {', '.join(sorted({f'docs/{section.page}' for section in sections}))}.")


if __name__ == "__main__":
    main()
