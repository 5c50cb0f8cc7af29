"""`memprof export`: a recording in another tool's format."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from memprof.errors import UsageError
from memprof.units import format_bytes


@click.command(
    epilog="""\b
Examples:
  memprof export run.memprof --to snapshot -o snapshot.pickle
  memprof export ranks/ --rank 3 --to snapshot -o rank3.pickle -f
  python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o snapshot.html"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("--to", "kind", type=click.Choice(("snapshot",)), required=True, help="The format to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help="The file."
)
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Export this rank.")
@click.option("-f", "--force", is_flag=True, help="Replace the file if it exists.")
def export(trace: str, kind: str, output: Path, rank: int | None, force: bool) -> None:
    """Write a recording in another tool's format.

    With --to snapshot, a memory snapshot as torch writes it, for pytorch.org/memory_viz and torch.cuda._memory_viz.
    Every allocation is what was recorded; its address, and the segments, are what torch's caching allocator would
    have chosen.
    """
    if output.exists() and not force:
        raise UsageError(f"{output} exists already. Replace it with -f, or choose another name.")
    if not output.parent.is_dir():
        raise UsageError(f"There is no folder {output.parent} to write {output.name} to.")
    from memprof.analysis.snapshot_export import export_snapshot
    from memprof.trace.store import Trace
    from memprof.trace.whole_file import whole_file

    content = export_snapshot(Trace.open(trace, rank))
    with whole_file(output) as file:
        file.write(content)
    print(f"memprof: wrote {output} ({format_bytes(len(content))})", file=sys.stderr)
