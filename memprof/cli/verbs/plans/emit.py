"""`memprof emit`: a plan as PyTorch code, or as another trainer's configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.emit.registry import TARGETS
from memprof.errors import UsageError
from memprof.harmless import notify
from memprof.trace.files.place import check_output

if TYPE_CHECKING:
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.emit.emission import Emitted
    from memprof.planners.search.candidate import Candidate
    from memprof.policies.plan.plan import Plan


@click.command(
    epilog="""\b
Examples:
  memprof emit plan.toml --to pytorch -o under_plan.py
  memprof emit plan.toml --to deepspeed --batch 32 -o ds_config.json
  memprof suggest run.memprof --budget 8GiB --emit hf > under_plan.py"""
)
@click.argument("plan_path", type=click.Path(path_type=Path), metavar="PLAN")
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The form to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file.  [default: stdout]",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples in the job's whole batch, for formats that contain the micro-batch size.",
)
def emit(plan_path: Path, target: str, output: Path | None, force: bool, batch: int | None) -> None:
    """Write a plan as PyTorch code, or as another trainer's configuration.

    pytorch and fsdp2 write a file that needs torch alone, and memprof for what torch has no way of its own for; hf,
    lightning and torchtitan a file with their arguments, deepspeed a JSON, trl, axolotl and ms-swift a YAML. What a
    format cannot express is reported on stderr, and in a comment in the file if possible. If it can express nothing,
    the exit code is 2.
    """
    if output is not None:
        check_output(output, force=force)
    from memprof.policies.plan.plan_file import read_plan

    emitted = emitted_or_refused(read_plan(plan_path), target, str(plan_path), output=output, batch=batch or 0)
    if output is None:
        sys.stdout.write(emitted.text)
        return
    from memprof.trace.files.whole_file import whole_file

    with whole_file(output) as file:
        file.write(emitted.text.encode())
    notify(f"wrote {output}")


def emitted_or_refused(plan: Plan, target: str, source: str, *, output: Path | None = None, batch: int = 0) -> Emitted:
    """Exports a plan to a format, and prints on stderr what is not expressible in it.

    Args:
        plan: The plan.
        target: Name of the format.
        source: Name of the plan.
        output: The file to write; its name is the module to import, ``under_plan`` without one.
        batch: Samples in the whole batch; 0 if unknown.

    Raises:
        UsageError: The plan is empty, or nothing of it is expressible in the format.
    """
    from memprof.emit.emission import Request
    from memprof.emit.registry import target_named
    from memprof.emit.switches import in_own_names

    form = target_named(target)
    if not plan.policies:
        raise UsageError(f"nothing to write: {source} has no policies.")
    module = output.stem if output is not None and output.stem.isidentifier() else "under_plan"
    emitted = form.emit(Request(in_own_names(plan), source, module, batch))
    if not emitted.expressed:
        raise UsageError(f"{form.title} can express nothing of {source}: {' '.join(emitted.cannot)}")
    for sentence in emitted.notes:
        notify(f"note: {sentence}")
    for sentence in emitted.cannot:
        notify(f"cannot express {sentence}")
    return emitted


def print_suggested(found: Suggestion, chosen: Candidate | None, target: str) -> None:
    """Prints the plan of a search in another format; a job that already fits needs none.

    Raises:
        GateFailedError: No plan fits, or no plan is confirmed by a dry run.
        UsageError: Nothing of the plan is expressible in the format.
    """
    from memprof.analysis.plans.suggest import describe_least
    from memprof.errors import GateFailedError

    if chosen is None:
        is_known = found.answer.best is not None
        raise GateFailedError("No plan that was dry-run fits; none is emitted." if is_known else describe_least(found))
    if not chosen.policies:
        notify("the job already fits: there is no plan to emit")
        return
    words = f"memprof suggest {found.trace}"
    sys.stdout.write(emitted_or_refused(found.predicted(chosen), target, words, batch=found.basis.batch or 0).text)
