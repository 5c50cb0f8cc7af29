"""`memprof data`: the batches of a job's training data, and the peak of the worst one, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memprof.analysis.table import NUMBER, TEXT, FactTable, shown
from memprof.cli.options.command_classes import RecordCommand, device_option, option
from memprof.cli.options.shared_options import job_arguments, json_option
from memprof.launch.parent.target import find_target

if TYPE_CHECKING:
    from memprof.analysis.plans.data_batches import DataBatches
    from memprof.cli.page import Page

PARTS = (
    shown("part", TEXT, lambda part: part.name),
    shown("least", NUMBER),
    shown("median", NUMBER),
    shown("p90", NUMBER),
    shown("p99", NUMBER),
    shown("most", NUMBER),
    shown("typical", TEXT, lambda part: part.typical_shape),
    shown("in the worst batch", TEXT, lambda part: part.worst_shape),
)
#: Exit status of shells for a death by signal 0.
_SIGNAL = 128


@click.command(
    "data",
    cls=RecordCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  memprof data train.py
  memprof data --device rtx4090 --seconds 120 train.py --epochs 1""",
)
@device_option("device", "Dry-run on this GPU, which is simulated.", group="Dry run", default="")
@option(
    "--seconds",
    group="Data",
    type=click.FloatRange(min=0.1),
    default=20.0,
    show_default=True,
    metavar="S",
    help="Time that reading an epoch may take; batches spread over it are read where it takes longer.",
)
@json_option
@job_arguments
@click.pass_context
def data(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    device: str,
    seconds: float,
    is_json: bool,
    is_module: bool,
) -> int:
    """Find the batch of a job's data that peaks highest, without training.

    The job is dry-run up to its training loop. There, an epoch is read with its own data set, sampler and collate
    function, and only a typical batch and the largest by each part are trained on, without computing anything. The
    job's output is discarded. In a loop without a DataLoader, up to 64 steps are dry-run.

    Exit status: 0; 2 the job cannot be found; 3 it cannot be dry-run, or trains in fewer than two steps.
    """
    target = find_target(words, is_module=is_module, is_command=ctx.meta["is_command"], verb="data")
    from memprof.cli.page import show
    from memprof.launch.dry.data_run import read_data
    from memprof.launch.dry.dry_outcome import EndedError

    try:
        found = read_data(target, device, seconds)
    except EndedError as error:
        return _SIGNAL + error.number
    show(lambda page: _fill(page, found), found.to_json, is_json=is_json)
    return 0


def _fill(page: Page, found: DataBatches) -> None:
    page.say(found.describe(), "bold")
    if found.fits:
        page.say(found.fits)
    for sentence in found.describe_reading():
        page.say(sentence, "dim")
    if found.parts:
        page.add_section("Elements of a batch over an epoch", FactTable(PARTS, found.parts))
