"""`memprof import`: converts memory snapshots and profiler traces to recordings that every verb opens."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.shared_options import categories_option
from memprof.errors import UsageError
from memprof.harmless import notify
from memprof.trace.files.place import Place, check_output

if TYPE_CHECKING:
    from memprof.analysis.table import Column, FactTable
    from memprof.trace.importers.importing import Imported
    from memprof.trace.importers.snapshot import Progress

#: Size in bytes above which a file is large, and the memory it needs per byte of its size (measured: 4 to 9).
_LARGE_BYTES = 200_000_000
_MEMORY_PER_BYTE = 9

_PICKLES = (".pickle", ".pkl")  # as they are, not compressed
_SUFFIXES = (".gz", ".json", ".pt.trace", ".trace", ".pickle", ".pkl", ".html")


class _DeviceType(click.IntRange):
    """A device as the table names it (``cuda:1``, or its number), or ``host`` for memory that torch pins there."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number, HOST for the host."""
        from memprof.trace.importers.device import HOST, HOST_NAME

        number: Any = str(value).removeprefix("cuda:")
        return HOST if value == HOST_NAME else super().convert(number, param, ctx)


@click.command(
    "import",
    epilog="""\b
Examples:
  memprof import snapshot.pickle -o run.memprof && memprof report run.memprof
  memprof import trace.json.gz --json""",
)
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="RUN",
    help="Write the recording here.  [default: the file's name with .memprof, in this folder]",
)
@click.option("-f", "--force", is_flag=True, help="Replace the recording if it exists.")
@click.option(
    "--only", type=_DeviceType(), metavar="cuda:N|host", help="Import only this device, or the host's pinned memory."
)
@click.option("--device", "former", type=_DeviceType(), hidden=True)  # its name until 1.0; elsewhere a card's
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Import it as this rank.  [default: the device's number]"
)
@click.option(
    "--split",
    metavar="SIZE",
    help="Write a recording of each part of the history, of this many bytes of FILE: 100MiB. Only a part is in memory.",
)
@categories_option
@click.option(
    "--json", "is_json", is_flag=True, help="Print what the file holds as JSON: bytes as numbers, stable keys."
)
def import_(
    file: Path,
    output: Path | None,
    force: bool,
    only: int | None,
    former: int | None,
    rank: int | None,
    split: str | None,
    categories: Path | None,
    is_json: bool,
) -> None:
    """Convert another tool's file to a recording.

    FILE is a memory snapshot (torch.cuda.memory._dump_snapshot, or a page of memory_viz that holds one), a profiler's
    trace with memory events (torch.profiler with profile_memory=True) or its memory timeline (export_memory_timeline),
    as it is or compressed (gzip, xz, bzip2). The format is detected from content; pickles are never executed. Each
    device becomes a rank of the recording; memory that torch pinned on the host is shown, and imported with --only
    host.
    """
    if former is not None:
        if only is not None:
            raise UsageError("--device is the former name of --only: give one of them.")
        only = former
        notify("import --device is now --only, since --device names a card")
    target = output or Path(f"{_stem(file)}.memprof")
    if split is None:
        check_output(target, force=force, option="-o")
    # Reading needs numpy and pyarrow; `memprof import -h` needs neither.
    from memprof.analysis.allocator.imported_parts import imported_block_sizes
    from memprof.analysis.report.own_categories import read_categories
    from memprof.cli.page import show
    from memprof.trace.importers.importing import import_file
    from memprof.trace.store import write_trace

    rules = () if categories is None else read_categories(categories)
    if split is not None:
        if rank is not None or is_json:
            raise UsageError("--split writes recordings of one device each: --rank and --json do not go with it.")
        _import_parts(file, target, split, only, rules, force=force)
        return
    _warn_of_memory(file)
    with _progress(file) as on_progress:
        imported = import_file(file, only, rank, on_progress, imported_block_sizes)
        on_progress("writing", 0.0)
        write_trace(target, [(replace(manifest, categories=rules), tables) for manifest, tables in imported.ranks])
    show(
        lambda page: page.add(_devices(imported)),
        lambda: {"schema": 1, "kind": imported.kind, "devices": imported.devices},
        is_json=is_json,
    )
    for remark in imported.remarks:
        notify(f"{remark}")
    notify(f"wrote {target}; next: memprof report {shlex.quote(str(target))}")


def _import_parts(
    file: Path, target: Path, split: str, device: int | None, rules: tuple[str, ...], *, force: bool
) -> None:
    """Writes a recording of each part, each numbered before its suffix."""
    from tempfile import TemporaryDirectory

    from memprof.analysis.allocator.imported_parts import LEAST_BYTES, import_parts
    from memprof.trace.files.whole_file import translated
    from memprof.trace.store import write_trace
    from memprof.units import format_count, parse_bytes

    size = parse_bytes(split)
    if size < LEAST_BYTES:
        raise UsageError(f"--split {split} is too small: name at least 1MiB.")
    places: list[Place] = []
    remarks: dict[str, Path] = {}
    with _progress(file) as on_progress, ExitStack() as stack:
        for number, count, imported in import_parts(file, size, device, on_progress):
            if not places:  # all are checked before the first is written, which is the last part
                names = (f"{target.stem}-{place + 1:0{len(str(count))}}{target.suffix}" for place in range(count))
                places = [check_output(target.with_name(name), force=force, option="-o") for name in names]
                with translated(target):
                    waiting = Path(stack.enter_context(TemporaryDirectory(prefix=".memprof-", dir=target.parent)))
            path = places[number - 1].path
            written = [(replace(manifest, categories=rules), tables) for manifest, tables in imported.ranks]
            write_trace(waiting / path.name, written)
            remarks |= dict.fromkeys(imported.remarks, path)
        for place in places:  # only now that every part is whole
            with translated(place.path):
                (waiting / place.path.name).replace(place.target)
    for remark, path in reversed(remarks.items()):
        notify(f"{path.name}: {remark}")
    notify(f"wrote {format_count(len(places), 'part')}; next: memprof report {shlex.quote(str(places[0].path))}")


def _stem(file: Path) -> str:
    """Returns a file's name without the suffixes of snapshots and traces."""
    name = file.name
    while found := next((suffix for suffix in _SUFFIXES if name.endswith(suffix) and name != suffix), ""):
        name = name.removesuffix(found)
    return name


def _warn_of_memory(file: Path) -> None:
    """Warns on stderr if loading a file may need more memory than is free."""
    size = file.stat().st_size if file.is_file() else 0
    if size < _LARGE_BYTES:
        return
    from memprof.machines.host_limits import free_memory
    from memprof.units import format_bytes

    free = free_memory().free_bytes
    if size * _MEMORY_PER_BYTE > free:
        print(
            f"memprof: loading {file} may take up to {format_bytes(size * _MEMORY_PER_BYTE)} of memory; "
            f"{format_bytes(free)} are free.{' --split imports it in parts.' * (file.suffix in _PICKLES)}",
            file=sys.stderr,
        )


@contextmanager
def _progress(file: Path) -> Iterator[Progress]:
    """Shows the progress of a large file on stderr, if it is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console

    from memprof.units import printable

    name = printable(file.name)
    with Console(stderr=True, markup=False, highlight=False).status(f"reading {name}") as status:
        yield lambda what, share: status.update(f"{what} {name}: {share:.0%}" if share else f"{what} {name}")


def _devices(imported: Imported) -> FactTable:
    from memprof.analysis.table import BYTES, COUNT, TEXT, FactTable, shown

    def size(name: str) -> Column:
        return shown(name.replace("_", " "), BYTES, itemgetter(f"{name}_bytes"), missing="unknown")

    columns = (
        shown("device", TEXT, itemgetter("device")),
        shown("entries", COUNT, itemgetter("entries")),
        *map(size, ("peak_allocated", "peak_reserved", "end_allocated", "end_reserved")),
        shown("history", TEXT, _history),
    )
    return FactTable(columns, imported.devices)


def _history(device: dict[str, Any]) -> str:
    if device["entries"] < 2:
        return "none: end state only"
    if device["start_allocated_bytes"] is None:
        return "start unknown: peak is a lower bound"
    return "complete" if device["history_complete"] else "a window of the job"
