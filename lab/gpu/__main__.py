"""Validates memprof on a machine with one GPU, in one command.

python -m lab.gpu --out FOLDER [--device cuda|cpu] [--only SECTION]... [--minutes 10]

Each section runs in a process of its own, within its share of the time; results.json and results.md in the folder are
rewritten after each, and sections that are not run this time stay in them. Without a GPU nothing runs and nothing
fails. ``--device cpu`` rehearses every section at tiny sizes; its figures are no measurements. The exit code is 1 where
a section broke or a bar was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from lab.gpu.machine import ask_machine
from lab.gpu.results import Results, table_of
from lab.gpu.running import SHARES, run_section

OLDEST_TORCH = (2, 11)


def main() -> int:
    """Runs the sections asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, recordings and samples")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses at tiny sizes")
    parser.add_argument("--only", action="append", choices=tuple(SHARES), help="run this section (repeatable)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all sections together")
    args = parser.parse_args()
    machine = ask_machine(args.device)
    why = _why_not(machine, args.device)
    if why:
        print(f"lab/gpu: skipped: {why}. `--device cpu` rehearses every section without a GPU.")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results.load(args.out, machine)
    end = time.monotonic() + 60 * args.minutes
    names = [name for name in SHARES if not args.only or name in args.only]
    print(results.title, flush=True)
    for number, name in enumerate(names):
        left = end - time.monotonic()
        seconds = left * SHARES[name] / sum(SHARES[later] for later in names[number:])
        section = run_section(name, args.device, args.out, seconds)
        results.put(section)
        results.write()
        print(f"\n{table_of(section)}\n({name}: {section.status}, {section.seconds:.0f} s)", flush=True)
    done = [results.sections[name] for name in names]
    print(f"\n{results.summary(done)}\nWritten: {args.out / 'results.json'} and {args.out / 'results.md'}")
    return 0 if all(section.passed for section in done) else 1


def _why_not(machine: dict[str, object], device: str) -> str:
    """Says why nothing can be run, "" where it can."""
    if machine.get("error"):
        return str(machine["error"])
    torch = str(machine["torch"])
    if tuple(int(part) for part in torch.partition("+")[0].split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch} is here, and 2.11 or newer is needed"
    if device == "cuda" and not machine["has_cuda"]:
        return "torch finds no CUDA device"
    return ""


if __name__ == "__main__":
    sys.exit(main())
