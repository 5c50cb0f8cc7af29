"""`memprof report`: where the memory of a recorded job goes."""

from __future__ import annotations

import json

import click

_TABLES = ("category", "module", "op", "source", "stack", "phase", "storage")


class MomentType(click.ParamType[tuple[int | None, int | None]]):
    """``peak``, ``OP`` or ``STEP:OP``, as (step, operator); both None for the peak."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        """Reads a moment."""
        step, colon, op = str(value).rpartition(":")
        if value == "peak":
            return None, None
        if not op.isdecimal() or (bool(colon) and not step.isdecimal()):
            self.fail(f"{value!r} is not a moment: write peak, OP or STEP:OP, such as 4:812.", param, ctx)
        return (int(step) if colon else None), int(op)


@click.command(
    epilog="""\b
Examples:
  memprof report run.memprof
  memprof report run.memprof --by module --at 4:812
  memprof report run.memprof --json | python -m json.tool | less"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option(
    "--at",
    "moment",
    type=MomentType(),
    default="peak",
    metavar="peak|OP|STEP:OP",
    help="Show what is alive while this operator runs; operators are counted from 0 in the step.  [default: peak]",
)
@click.option("--by", "table", type=click.Choice(_TABLES), help="Show this table alone, with more rows.")
@click.option("--step", "step_number", type=click.IntRange(min=0), metavar="N", help="Report on this step.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Report on this rank.")
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Rows per table; the rest is summed in one.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, microseconds, stable keys.")
def report(
    trace: str,
    moment: tuple[int | None, int | None],
    table: str | None,
    step_number: int | None,
    rank: int | None,
    top: int | None,
    is_json: bool,
) -> None:
    """Show where the memory of a recorded job goes.

    TRACE is a .memprof file, a folder of them (one for each rank), or the spool folder of a recording that was cut
    short. Without options, the tables are of the peak of a steady step.
    """
    # The numbers behind a report take long to import; `memprof report -h` needs none of them.
    from memprof.analysis.report import build_report
    from memprof.trace.store import Trace

    at_step, op_id = moment
    if at_step is not None and step_number is not None and at_step != step_number:
        raise click.UsageError(f"--at {at_step}:{op_id} and --step {step_number} name two steps: leave one out.")
    fold_layers = not is_json and table != "module"
    built = build_report(
        Trace.open(trace, rank),
        rank=rank,
        step_number=at_step if at_step is not None else step_number,
        op_id=op_id,
        fold_layers=fold_layers,
    )
    if is_json:
        from memprof.analysis.report_json import report_to_json

        print(json.dumps(report_to_json(built, largest=top or 20), indent=2, allow_nan=False))
        return
    from memprof.cli.page import Page
    from memprof.cli.report_page import fill_page

    page = Page.for_stdout()
    fill_page(page, built, trace, table, top)
    page.write()
