"""Prints the matrix as Markdown: `python -m tests.policies.matrix`, with `--pairs` that of two policies."""

from __future__ import annotations

import sys

import torch

from tests.policies.matrix.catalog import usages
from tests.policies.matrix.cells import pair_plans, run_cell, single_plans, title_of
from tests.policies.matrix.expected import limitation


def main(arguments: list[str]) -> None:
    """Runs every cell that is not slow, and prints a row for each usage that does not work under every plan."""
    plans = pair_plans() if "--pairs" in arguments else single_plans()
    chosen = [usage for usage in usages() if not usage.is_slow]
    counts = {"passes": 0, "refused": 0, "fails": 0}
    rows = []
    for plan in plans:
        is_compiled = any(policy.name == "compile" for policy in plan.policies)
        with torch.compiler.set_stance("force_eager" if is_compiled else "default"):
            for usage in chosen:
                cell = run_cell(plan, usage)
                counts[cell.state] += 1
                if cell.state != "passes":
                    sentence = limitation(plan, usage.name) or cell.sentence
                    rows.append(f"| {title_of(plan)} | {usage.title} | {cell.state} | {sentence} |")
    print(f"{len(plans)} plans, {len(chosen)} usages: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    print()
    print("| plan | usage | | sentence |", "|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
