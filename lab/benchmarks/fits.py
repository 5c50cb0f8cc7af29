"""Do suggested plans really fit, when the sample jobs are run under them?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lab.benchmarks.recording import run, sample
from lab.benchmarks.section import Section, verdict

MODELS = ("gpt", "resnet", "lstm")
SHARES = (90, 80, 70, 60, 50, 40, 30)


def measure(folder: Path, *, quick: bool) -> Section:
    """Records each sample, asks for a plan at each budget, trains under it and compares."""
    rows, over, count = [], [], 0
    memprof = [sys.executable, "-m", "memprof.cli.main"]
    for model in MODELS:
        base, job = folder / f"{model}.memprof", sample(model)
        run(job.recorded(base), folder, OMP_NUM_THREADS="1")
        for share in SHARES[:: 3 if quick else 1]:
            plan, head = folder / f"{model}-{share}.toml", folder / "head.memprof"
            asked = [*memprof, "suggest", str(base), "--budget", f"{share}%", "--write", str(plan), "-f", "--json"]
            try:
                told = json.loads(run(asked, folder).stdout)
            except RuntimeError:
                rows.append((model, f"{share} %", "nothing fits", "", "", "", "", ""))
                continue
            command = job.recorded(head)
            place = command.index("record") + 1
            run([*command[:place], "--plan", str(plan), *command[place:]], folder, OMP_NUM_THREADS="1")
            found = json.loads(run([*memprof, "verify", str(plan), str(head), "--json"], folder).stdout)
            predicted, measured = found["predicted"], found["measured"]
            peak = measured["peak_allocated_bytes"]
            count += 1
            if peak > told["budget_bytes"]:
                over.append(f"{model} at {share} %")
            rows.append(
                (
                    model,
                    f"{share} %",
                    told["plans"][0]["describe"],
                    f"{predicted['peak_allocated_bytes']:,}",
                    f"{peak:,}",
                    f"{peak / told['budget_bytes']:.1%}",
                    f"{predicted['step_time_us'] / 1e3:.1f}",
                    f"{(measured['step_time_us'] or float('nan')) / 1e3:.1f}",
                )
            )
    text = f"measured peak within the budget: {count - len(over)} of {count}"
    return Section(
        "Suggested plans, applied",
        "The fastest plan that `memprof suggest` finds at each budget, a share of the recorded peak, and the job run "
        "under it, one thread.",
        (
            "model",
            "budget",
            "plan",
            "predicted peak",
            "measured peak",
            "of the budget",
            "predicted ms",
            "measured ms",
        ),
        tuple(rows),
        verdict(text + (f"; not {', '.join(over)}" if over else ""), passed=not over),
    )
