"""`memprof export`: a recording in another tool's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import click

from memprof.cli.options.shared_options import open_trace
from memprof.cli.verbs.report import MomentType
from memprof.errors import UsageError
from memprof.harmless import notify
from memprof.trace.files.place import check_output
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.trace.schema import Table
    from memprof.trace.store import Trace

_KINDS = ("perfetto", "speedscope", "csv", "parquet", "snapshot", "summary")
_FOLDERS = ("csv", "parquet")
_LIVES = 30


@click.command(
    epilog="""\b
Examples:
  memprof export run.memprof --to perfetto -o run.json.gz
  memprof export run.memprof --to summary -o memory.json
  memprof export run.memprof --to speedscope --at 4:812 -o run.speedscope.json
  memprof export run.memprof --to parquet --tables ops,storages -o tables/
  memprof export ranks/ --rank 3 --to snapshot -o rank3.pickle -f
  python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o snapshot.html"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("--to", "kind", type=click.Choice(_KINDS), required=True, help="The format to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File to write; for csv and parquet, a folder.  [summary: stdout; required for the others]",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Export this rank.")
@click.option(
    "--at",
    "moment",
    type=MomentType(),
    metavar="peak|OP|STEP:OP",
    help="speedscope: what is alive while this operator runs.  [default: peak]",
)
@click.option("--tables", metavar="NAME,...", help="csv, parquet: only these tables.")
@click.option(
    "--lives",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"perfetto: show the lifetimes of the N largest storages of the peak.  [default: {_LIVES}]",
)
@click.option("--scrub", "is_scrubbed", is_flag=True, help="Leave out arguments, paths, people and hosts, for sharing.")
@click.option(
    "-f", "--force", is_flag=True, help="Replace the file, or a folder of exported tables; summary does without."
)
def export(
    trace: str,
    kind: str,
    output: Path | None,
    rank: int | None,
    moment: tuple[int | None, int | None] | None,
    tables: str | None,
    lives: int | None,
    is_scrubbed: bool,
    force: bool,
) -> None:
    """Write a recording in another tool's format, or as a small baseline.

    perfetto is a timeline for ui.perfetto.dev: what memory holds, above steps, phases, module calls and operators;
    compressed where the name ends in .gz. Each rank is a process.

    speedscope is a flame graph of what is alive at the peak, by code and by module, for speedscope.app.

    csv and parquet are the tables themselves, a file each, with units and meanings beside them.

    snapshot is a memory snapshot as torch writes it, for pytorch.org/memory_viz and torch.cuda._memory_viz: every
    allocation is what was recorded; its address, and the segments, are what torch's caching allocator would have
    chosen.

    summary is JSON of a few kilobytes, to be committed as the base of memprof diff: the peak and the peak of each
    phase, the largest parts of each by category, module, operator, line and storage, and what the figures depend on,
    without a path outside the job's own folder. It replaces its file.
    """
    _refuse_strangers(kind, at=moment, tables=tables, lives=lives)
    if kind == "summary":
        return _write_summary(open_trace(trace, rank, is_scrubbed=is_scrubbed), output)
    if output is None:
        raise UsageError(f"--to {kind} needs a path to write to: add -o PATH.")
    _check_place(output, is_folder=kind in _FOLDERS, force=force)
    kinds = _tables(tables)
    opened = open_trace(trace, rank, is_scrubbed=is_scrubbed)
    private = not is_scrubbed
    if kind in _FOLDERS:
        size = _write_folder(output, opened, kind, rank, kinds, is_private=private)
    elif kind == "perfetto":
        size = _write_timeline(output, opened, rank, _LIVES if lives is None else lives, is_private=private)
    elif kind == "snapshot":
        size = _write_snapshot(output, opened, is_private=private)
    else:
        size = _write_stacks(output, opened, moment, is_private=private)
    notify(f"wrote {output} ({format_bytes(size)})")


def _write_summary(opened: Trace, output: Path | None) -> None:
    from memprof.analysis.diff.summary import summarise, summary_to_json
    from memprof.cli.verbs.diff import write_text

    text = json.dumps(summary_to_json(summarise(opened)), indent=1, allow_nan=False) + "\n"
    write_text(text, output)
    if output is not None:
        notify(f"wrote {output} ({format_bytes(len(text))})")


def _refuse_strangers(kind: str, **given: object) -> None:
    """Rejects options of other formats."""
    belongs = {"at": ("speedscope",), "tables": _FOLDERS, "lives": ("perfetto",)}
    for option, kinds in belongs.items():
        if given[option] is not None and kind not in kinds:
            raise click.UsageError(f"--{option} is for --to {' and '.join(kinds)}: leave it out.")


def _check_place(output: Path, *, is_folder: bool, force: bool) -> None:
    """Rejects an unwritable output path before any work is done."""
    if not is_folder:
        if output.is_dir():
            raise UsageError(f"{output} is a folder, but this format is one file: choose another name.")
        check_output(output, force=force)
        return
    if not output.parent.is_dir():
        raise UsageError(f"no folder {output.parent} to write {output.name} to: create it first.")
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"{output} is a file, but this format is a folder: choose another name.")
    if not force:
        raise UsageError(f"{output} exists already. Replace it with -f, or choose another name.")
    from memprof.trace.exporters.tables import is_export

    if any(output.iterdir()) and not is_export(output):
        raise UsageError(
            f"{output} contains files other than exported tables and was not changed: choose another name."
        )


def _tables(names: str | None) -> list[type[Table]]:
    """Returns the requested tables.

    Raises:
        UsageError: Unknown table.
    """
    from memprof.trace.exporters.tables import named_tables

    return list(named_tables([name.strip() for name in (names or "").split(",") if name.strip()]))


def _write_folder(
    output: Path, opened: Trace, form: str, rank: int | None, kinds: list[type[Table]], *, is_private: bool
) -> int:
    from memprof.trace.exporters.tables import write_tables
    from memprof.trace.files.whole_file import whole_folder

    with whole_folder(output, is_private=is_private) as folder:
        return write_tables(folder, opened, opened.ranks if rank is None else (rank,), kinds, form)


def _write_timeline(output: Path, opened: Trace, rank: int | None, lives: int, *, is_private: bool) -> int:
    from memprof.analysis.export.timeline_export import export_timeline
    from memprof.trace.files.whole_file import whole_file

    ranks = opened.ranks if rank is None else (rank,)
    with whole_file(output, is_private=is_private) as file:
        if output.suffix == ".gz":
            # Without timestamp and name, the same recording exports to the same bytes.
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                export_timeline(opened, ranks, lives, cast(BinaryIO, packed))
        else:
            export_timeline(opened, ranks, lives, file)
        return file.tell()


def _write_snapshot(output: Path, opened: Trace, *, is_private: bool) -> int:
    from memprof.analysis.export.snapshot_export import export_snapshot
    from memprof.trace.files.whole_file import whole_file

    with whole_file(output, is_private=is_private) as file:
        export_snapshot(opened, file)
        return file.tell()


def _write_stacks(
    output: Path, opened: Trace, moment: tuple[int | None, int | None] | None, *, is_private: bool
) -> int:
    from memprof.analysis.export.stacks_export import export_stacks
    from memprof.trace.files.whole_file import whole_file

    step_number, op_id = moment or (None, None)
    exported = export_stacks(opened, step_number, op_id)
    notify(f"{format_bytes(exported.total_bytes)} alive at {exported.moment}")
    with whole_file(output, is_private=is_private) as file:
        file.write(exported.content)
    return len(exported.content)
