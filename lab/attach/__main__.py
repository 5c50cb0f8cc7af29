"""Attaches to running jobs of many kinds and compares them with runs that nothing attached to.

python -m lab.attach [--out FOLDER] [--kind TEXT]... [--mode MODE]... [--python PROGRAM]

A row for each kind of job, a column for each way to attach: ``ok``, or what of the job differs (its exit status, stdout
or stderr), and the exit code of ``memprof attach``. The exit code is 1 where a job differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lab.attach.kinds import Kind, chosen
from lab.attach.running import MODES, Outcome, run

_ALLOWED = {0, 2, 3}  # done; refused in one sentence; ended or did not answer


def main() -> int:
    """Runs what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.attach", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/attach"), help="folder for what each run leaves")
    parser.add_argument("--kind", action="append", default=[], help="only kinds whose name contains this (repeatable)")
    parser.add_argument("--mode", action="append", choices=MODES, help="only this way to attach (repeatable)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the jobs, which needs torch and numpy")
    args = parser.parse_args()
    modes = [mode for mode in MODES[1:] if not args.mode or mode in args.mode]
    print(subprocess.check_output([args.python, "-V"], text=True))
    print("|".join(["", *(f" {word} " for word in ("job", *modes)), ""]))
    print("|" + "---|" * (1 + len(modes)), flush=True)
    failed = []
    for kind in chosen(args.kind):
        home = args.out.resolve() / "".join(letter if letter.isalnum() else "-" for letter in kind.name)
        plain = run(kind, "nothing", home / "nothing", args.python)
        print(f"| {kind.name} |", end="", flush=True)
        if not kind.ends and plain.status:
            print(f" plain run ends with {plain.status}: see {home} |")
            failed.append(f"{kind.name}: the plain run ends with {plain.status}")
            continue
        for mode in modes:
            outcome = run(kind, mode, home / mode, args.python)
            words, why = _judge(kind, outcome, plain)
            failed += [f"{kind.name}, {mode}: {why} (see {home / mode})"] if why else []
            print(f" {words} |", end="", flush=True)
        print(flush=True)
    print("", *failed, sep="\n")
    return int(bool(failed))


def _judge(kind: Kind, outcome: Outcome, plain: Outcome) -> tuple[str, str]:
    """Returns what stands in the table's cell, and what failed, "" where nothing did."""
    found = outcome.differs_from(plain)
    code = outcome.attach_status
    if code is None:
        found.append("attach hangs")
    elif code not in _ALLOWED and code > 0:
        found.append(f"attach exits with {code}")
    if "Traceback" in outcome.attach_text:
        found.append("attach prints a traceback")
    figures = f"{code}, {outcome.seconds:.1f} s" if code is not None else "-"
    return f"{'**' + ' '.join(found) + '**' if found else 'ok'} ({figures})", ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
