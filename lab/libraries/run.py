"""Runs the matrix of libraries, and writes its tables: lab/libraries/results.md, and docs/libraries.md in short.

python lab/libraries/run.py [--only NAME]... [--again] [--no-write]

Results are kept per cell in build/libraries, so that a stopped run goes on; --again measures anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # so that lab.* is found however this file is started

from lab.libraries.cells import cells  # noqa: E402 - needs the path above
from lab.libraries.measure import measure_cell, save  # noqa: E402
from lab.libraries.page import summary, write_page  # noqa: E402


def main() -> None:
    """Measures the cells asked for that have no results yet."""
    known = {cell.name: cell for cell in cells()}
    parser = argparse.ArgumentParser(description="Runs the matrix of libraries (docs/libraries.md).")
    parser.add_argument("--only", action="append", metavar="NAME", help="measure this cell (repeatable)")
    parser.add_argument("--again", action="store_true", help="measure cells that have results, too")
    parser.add_argument("--no-write", action="store_true", help="leave both tables as they are")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "libraries", help="where results are kept")
    parser.add_argument("--list", action="store_true", help="print the names of all cells")
    args = parser.parse_args()
    if args.list:
        print(*known, sep="\n")
        return
    unknown = set(args.only or ()) - set(known)
    if unknown:
        parser.error(f"unknown cell {', '.join(sorted(unknown))}; --list prints all")
    args.kept.mkdir(parents=True, exist_ok=True)
    for name in args.only or known:
        kept = args.kept / f"{name}.json"
        if args.again or not kept.exists():
            with tempfile.TemporaryDirectory(prefix="memprof-libraries-") as folder:
                save(measure_cell(known[name], Path(folder)), kept)
        print(summary(known[name], json.loads(kept.read_text(encoding="utf-8"))), flush=True)
    if not args.no_write:
        write_page({name: _read(args.kept / f"{name}.json") for name in known})


def _read(path: Path) -> dict[str, object] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


if __name__ == "__main__":
    main()
