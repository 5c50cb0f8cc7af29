"""Measures one cell: every way of running it, each a number or a sentence that says why not."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.libraries.cells import Cell
from memprof.analysis.plans.verify import verify_plan
from memprof.launch.fit.request import measure as measured
from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace

CARDS = ("rtx4090", "h100-80g")
#: Seconds that one process may take, and that a search may: the second where the first was stopped without a plan.
LIMIT_S, SEARCHES_S = 300, (10, 60)
#: Packages that cannot be installed beside the others: see the Makefile.
VISION = "MEMPROF_VISION"
_LONGEST = 220


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Runs a cell every way.

    Args:
        cell: The cell.
        folder: An empty folder for its files.

    Returns:
        By way (``plain``, ``record``, ``dry``, the cards, ``suggest``, ``plan``), a dict with numbers (peaks in
        bytes, ``seconds``) or with a ``sentence``; and the ``day``.
    """
    script = [str(cell.path), *cell.arguments]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    found: dict[str, Any] = {"day": day, "plain": _plain(script, folder)}
    if "sentence" in found["plain"]:
        return found
    found["record"] = recording(folder, "run", script)
    found["record"]["same_losses"] = found["record"].pop("printed", None) == found["plain"].pop("printed")
    found["dry"] = recording(folder, "dry", script, "--dry-run")
    for card in CARDS:
        found[card] = recording(folder, card, script, "--dry-run", "--device", card)
    for way in ("dry", *CARDS):
        found[way].pop("printed", None)
    if "peak" not in found["record"]:
        return found
    found["suggest"] = _suggested(folder, cell.share)
    if "predicted" in found["suggest"]:
        found["plan"] = _applied(folder, script)
    return found


def _run(folder: Path, words: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    vision = os.environ.get(VISION, "")
    path = os.pathsep.join(part for part in (vision, os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if path and any("timm" in word for word in words):
        environment["PYTHONPATH"] = path
    if "--device" in words:
        environment["ON_GPU"] = "1"  # read by scripts of lab/real
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(words, 124, "", f"took longer than {LIMIT_S} s")
    (folder / "last.txt").write_text(f"$ {words}\n{done.stdout}\n{done.stderr}\nstatus {done.returncode}\n")
    return done, time.monotonic() - begin


def _plain(script: list[str], folder: Path) -> dict[str, Any]:
    done, seconds = _run(folder, script)
    if done.returncode:
        return {"sentence": _reason(done)}
    return {"seconds": round(seconds, 1), "printed": _losses(done.stdout)}


def recording(folder: Path, name: str, script: list[str], *options: str) -> dict[str, Any]:
    """Returns the peak of a script's recording, or the sentence that says why there is none.

    Args:
        folder: Where the recording is written.
        name: Its file, without the ending.
        script: The script and its arguments.
        options: Options of ``memprof record``.
    """
    path = folder / f"{name}.memprof"
    done, seconds = _run(folder, ["-m", "memprof", "record", "-f", "-o", str(path), *options, *script])
    if done.returncode:
        return {"sentence": _reason(done)}
    trace = Trace.open(path)
    step = trace.fullest_step()
    step.check()
    kinds = {"forward", "backward", "optimizer"} - set(step.ops.phase)
    if kinds:
        return {"sentence": f"the recorded step has no {', '.join(sorted(kinds))}"}
    numbers = {"peak": measured(trace).peak_bytes, "seconds": round(seconds, 1), "printed": _losses(done.stdout)}
    numbers["steps"] = {str(number): peak for number, peak in trace.step_peaks().items()}
    if "--device" in options:
        kinds = set(step.storages.device[step.storages.category == "parameter"])
        if not any("cuda" in str(kind) for kind in kinds):
            return {"sentence": "the model's parameters are not on the device"}
    return numbers


def _suggested(folder: Path, share: float) -> dict[str, Any]:
    spent = 0.0
    for limit in SEARCHES_S:
        words = ["--budget", f"{share:.0%}", "--time-limit", str(limit), "-f", "--write", str(folder / "plan.toml")]
        done, seconds = _run(folder, ["-m", "memprof", "suggest", str(folder / "run.memprof"), *words, "--json"])
        spent += seconds
        if done.returncode not in (0, 4):
            return {"sentence": _reason(done)}
        found = json.loads(done.stdout)
        if done.returncode == 0 or found["is_complete"]:
            break
    if done.returncode:
        return {"sentence": found["reason"], "seconds": round(spent, 1)}
    plan = read_plan(folder / "plan.toml")
    assert plan.prediction is not None
    words = [policy.describe() for policy in plan.policies]
    return {
        "plan": ", ".join(words),
        "predicted": plan.prediction.peak_allocated_bytes,
        "seconds": round(spent, 1),
    }


def _applied(folder: Path, script: list[str]) -> dict[str, Any]:
    path = folder / "under.memprof"
    words = ["-m", "memprof", "record", "-f", "-o", str(path), "--plan", str(folder / "plan.toml"), *script]
    done, seconds = _run(folder, words)
    if done.returncode:
        return {"sentence": _reason(done)}
    verified = verify_plan(read_plan(folder / "plan.toml"), Trace.open(path))
    return {
        "measured": verified.measured.peak_allocated_bytes,
        "error": verified.peak_error_ratio,
        "seconds": round(seconds, 1),
    }


def _losses(printed: str) -> list[str]:
    """Returns the lines with a loss: what training came to, without times."""
    return re.findall(r"(?:'?loss'?:? |^\d+ )['\d][\d.e+-]*", printed, re.MULTILINE)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the sentence in which a run said why it failed."""
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    ours = [line.removeprefix("memprof: ") for line in lines if line.startswith("memprof: ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    said = (errors or ours or lines or ["it printed nothing"])[-1 if errors else 0]
    return f"status {done.returncode}: {said}"[:_LONGEST]


def save(found: dict[str, Any], path: Path) -> None:
    """Writes a cell's results, in one move."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    part.replace(path)
