"""`memprof report`: where the memory of a recorded job goes."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from memprof.cli.options.command_classes import GroupedCommand, option
from memprof.cli.options.shared_options import categories_option, force_option, json_option, open_trace
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.json_values import Json
    from memprof.trace.store import Trace


class Exporter(Protocol):
    """Writes a report as one HTML page: ``memprof_dashboard.export_page.export.export_html``."""

    def __call__(
        self, trace: Trace, *, rank: int | None, step_number: int | None, op_id: int | None, rows: int | None
    ) -> str:
        """Returns the page."""
        ...


_TABLES = ("category", "module", "op", "source", "stack", "phase", "metadata", "storage", "rank")


class MomentType(click.ParamType[tuple[int | None, int | None]]):
    """``peak``, ``OP`` or ``STEP:OP``, as (step, operator); both None for the peak."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        """Parses a moment."""
        step, colon, op = str(value).rpartition(":")
        if value == "peak":
            return None, None
        if not op.isdecimal() or (bool(colon) and not step.isdecimal()):
            self.fail(f"{value!r} is not a valid moment: write peak, OP or STEP:OP, such as 4:812.", param, ctx)
        return (int(step) if colon else None), int(op)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof report run.memprof
  memprof report run.memprof --by module --at 4:812
  memprof report run.memprof --allocator
  memprof report run.memprof --leaks
  memprof report run.memprof --html report.html --scrub
  memprof report run.memprof --json | python -m json.tool | less""",
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.argument("later", type=click.Path(), metavar="[LATER...]", nargs=-1)
@option(
    "--at",
    "moment",
    group="Moment",
    type=MomentType(),
    default="peak",
    metavar="peak|OP|STEP:OP",
    help="Show what is alive while this operator runs; operators are counted from 0 in the step.  [default: peak]",
)
@option("--by", "table", group="Tables", type=click.Choice(_TABLES), help="Show only this table, with more rows.")
@option("--step", "step_number", group="Moment", type=click.IntRange(min=0), metavar="N", help="Report on this step.")
@option("--rank", group="Moment", type=click.IntRange(min=0), metavar="N", help="Report on this rank.")
@option(
    "--top", group="Tables", type=click.IntRange(min=1), metavar="N", help="Rows per table; the rest is summed in one."
)
@categories_option
@json_option
@option(
    "--html",
    "page_path",
    group="Output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the report with its figures to this file, which needs no network.",
)
@option(
    "--scrub",
    "is_scrubbed",
    group="Output",
    is_flag=True,
    help="Leave out arguments, paths, people and hosts, for sharing.",
)
@option(
    "--allocator",
    "page_kind",
    group="Tables",
    flag_value="allocator",
    help="Show reserved memory, what of it is unused, and why.",
)
@option(
    "--static", "page_kind", group="Tables", flag_value="static", help="Show what the step needs with a static plan."
)
@option(
    "--leaks",
    "page_kind",
    group="Tables",
    flag_value="leaks",
    help="Show whether memory grows from step to step, which tensors stay, and what holds them.",
)
@force_option
def report(
    trace: str,
    later: tuple[str, ...],
    moment: tuple[int | None, int | None],
    table: str | None,
    step_number: int | None,
    rank: int | None,
    top: int | None,
    categories: Path | None,
    is_json: bool,
    page_path: Path | None,
    is_scrubbed: bool,
    page_kind: str | None,
    force: bool,
) -> None:
    """Show where the memory of a recorded job goes.

    TRACE is a .memprof file, a folder of them (one for each rank), or the spool folder of a recording that was cut
    short. Without options, the tables are of the peak of the fullest step. With --leaks, several recordings of one
    job, in their order, are compared: what is in use at the end of each.
    """
    if later and page_kind != "leaks":
        raise click.UsageError(f"only --leaks takes several recordings: leave out {later[0]}.")
    at_step, op_id = moment
    if at_step is not None and step_number is not None and at_step != step_number:
        raise click.UsageError(f"--at {at_step}:{op_id} and --step {step_number} both choose a step: give only one.")
    if categories is not None and (page_kind is not None or page_path is not None or table == "rank"):
        raise click.UsageError(
            "--categories is for the tables of one moment: leave out the other pages, --html and --by rank."
        )
    chosen_step = at_step if at_step is not None else step_number
    if page_kind is not None:
        if page_path is not None or table is not None or op_id is not None:
            raise click.UsageError(f"--{page_kind} has a page of its own: leave out --html, --by and --at.")
        if page_kind == "leaks":
            if chosen_step is not None:
                raise click.UsageError("--leaks is about all recorded steps: leave out --step.")
            from memprof.cli.pages.report_page import show_leaks

            traces = [open_trace(path, rank, is_scrubbed=is_scrubbed) for path in (trace, *later)]
            show_leaks(traces, rank, top, is_json=is_json)
            return
        from memprof.cli.pages.allocator_page import show_page

        opened = open_trace(trace, rank, is_scrubbed=is_scrubbed)
        name = str(opened.path) if is_scrubbed else trace
        show_page(page_kind, opened, name, rank, chosen_step, top, is_json=is_json)
        return
    if page_path is not None:
        _check_page(page_path, is_other=is_json or table is not None, force=force)
        exporter = _exporter()
        opened = open_trace(trace, rank, is_scrubbed=is_scrubbed)
        from memprof.trace.files.whole_file import whole_file

        page_text = exporter(opened, rank=rank, step_number=chosen_step, op_id=op_id, rows=top)
        with whole_file(page_path, is_private=not is_scrubbed) as file:
            file.write(page_text.encode("utf-8", "replace"))
        notify(f"wrote {page_path}")
        return
    if table == "rank":
        if rank is not None or op_id is not None or chosen_step is not None:
            raise click.UsageError("--by rank compares all ranks at their peaks: leave out --rank, --step and --at.")
        opened = open_trace(trace, rank, is_scrubbed=is_scrubbed)
        _show_ranks(opened, str(opened.path) if is_scrubbed else trace, top, is_json=is_json)
        return
    # The report's numerics are slow to import; `memprof report -h` needs none of them.
    from memprof.analysis.report.own_categories import read_categories
    from memprof.analysis.report.report import build_report

    rules = () if categories is None else read_categories(categories)
    opened = open_trace(trace, rank, is_scrubbed=is_scrubbed)
    fold_layers = not is_json and table != "module"
    built = build_report(opened, rank, chosen_step, op_id, fold_layers, rules)
    from memprof.cli.page import show
    from memprof.cli.pages.report_page import fill_page

    def as_json() -> Json:
        from memprof.analysis.report.report_json import report_to_json  # the page needs none of it

        return report_to_json(built, largest=top or 20)

    name = str(opened.path) if is_scrubbed else trace
    show(lambda page: fill_page(page, built, name, table, top), as_json, is_json=is_json)


def _show_ranks(opened: Trace, name: str, top: int | None, *, is_json: bool) -> None:
    """Prints the comparison of ranks, without reading their tables."""
    from memprof.analysis.ranks.rank_report import compare_ranks, job_notes
    from memprof.analysis.ranks.rank_tables import ranks_to_json
    from memprof.analysis.ranks.stragglers import find_stragglers
    from memprof.cli.page import show
    from memprof.cli.pages.report_page import fill_rank_page

    compared, found, notes = compare_ranks(opened), find_stragglers(opened), job_notes(opened)
    show(
        lambda page: fill_rank_page(page, compared, found, notes, name, top),
        lambda: ranks_to_json(compared, found, notes),
        is_json=is_json,
    )


def _check_page(path: Path, *, is_other: bool, force: bool) -> None:
    """Rejects an unwritable output page before any work is done."""
    if is_other:
        raise click.UsageError("--html writes every table: leave out --by and --json.")
    from memprof.trace.files.place import check_output

    check_output(path, force=force)


def _exporter() -> Exporter:
    """Returns the HTML exporter from the dashboard's package, which needs plotly."""
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("--html needs the dashboard's figures: pip install 'torch-memprof[dashboard]'")
    exporter: Exporter = importlib.import_module("memprof_dashboard.export_page.export").export_html
    return exporter
