"""`memprof compare-allocations`: what a real device allocated beside what a dry run does, allocation by allocation."""

from __future__ import annotations

import importlib
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.options.command_classes import device_option
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.compared.allocation_sequence import AllocationSequence
    from memprof.analysis.compared.comparison import AllocationComparison


@click.command(
    "compare-allocations",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  memprof compare-allocations --device a100-80g gpu.pickle -- train.py --batch-size 8
  memprof compare-allocations --device a100-80g --row gpu.pickle -- train.py --batch-size 8
  memprof compare-allocations gpu.pickle dry-run.pickle
  memprof compare-allocations --dashboard gpu.pickle dry-run.pickle""",
)
@device_option("device", "The device to simulate, such as rtx4090 or a100-80g.")
@click.option("--tolerance", default="0%", metavar="PERCENT", help="Largest error of the peak. Default: 0%.")
@click.option("--top", default=12, metavar="N", help="Kinds of differences to list. Default: 12.")
@click.option("--figure", type=click.Path(), metavar="FILE.svg", help="Draw both sides' live bytes over each other.")
@click.option("--dashboard", "in_dashboard", is_flag=True, help="Show both sides in a browser, until Ctrl-C.")
@click.option("--row", "is_row", is_flag=True, help="Print one row of the table in docs/how-true.md, to contribute it.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
@click.argument("snapshot", type=click.Path(), metavar="SNAPSHOT")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="{OTHER | -- SCRIPT [ARGS]...}")
def compare_allocations(
    snapshot: str,
    rest: tuple[str, ...],
    device: str | None,
    tolerance: str,
    top: int,
    figure: str | None,
    in_dashboard: bool,
    is_row: bool,
    is_json: bool,
) -> int:
    """Compare a real GPU's allocations with a dry run's.

    SNAPSHOT is what the job wrote on a GPU with torch.cuda.memory._dump_snapshot(). With --device, the job's own script
    is dry-run on that device, until it writes its snapshot there; the file of the real GPU is not touched. OTHER
    is a snapshot or a recording that exists already.

    Bytes are requested bytes rounded up to 512 on both sides. The exit code is 4 if the peaks differ by more than
    --tolerance.
    """
    share = _share(tolerance)
    rest = rest[1:] if rest[:1] == ("--",) else rest
    if not rest:
        raise UsageError("There is nothing to compare with: give another snapshot, or --device NAME and -- train.py.")
    from memprof.analysis.compared.allocation_sequence import read_sequence
    from memprof.analysis.compared.comparison import compare_sequences, require_aligner
    from memprof.errors import GateFailedError

    require_aligner()
    if in_dashboard:
        importlib.import_module("memprof_dashboard.command").require_dash()
    real = read_sequence(snapshot)
    with ExitStack() as stack:
        if device is None:
            if len(rest) > 1 or rest[0].endswith(".py"):
                raise UsageError("To dry-run a script, name the GPU of the snapshot: --device rtx4090.")
            compared = compare_sequences(real, read_sequence(rest[0]))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-compare-"))
            compared = _dry_run(real, list(rest), device, Path(folder))
        _show(compared, device or "", top, figure, is_row=is_row, is_json=is_json)
        if in_dashboard:
            importlib.import_module("memprof_dashboard.command").show_allocations(
                Path(snapshot), Path(compared.dry.source)
            )
    return 0 if compared.peak_is_within(share) else GateFailedError.exit_code


def _show(
    compared: AllocationComparison, device: str, top: int, figure: str | None, *, is_row: bool, is_json: bool
) -> None:
    if figure is not None:
        _draw(compared, figure)
    if is_json:
        from memprof.analysis.compared.comparison_words import comparison_to_json

        print(json.dumps(comparison_to_json(compared), indent=2, allow_nan=False))
    elif is_row:
        from memprof.cli.pages.allocations_page import describe_row

        print(describe_row(compared, device))
    else:
        from memprof.cli.pages.allocations_page import show_allocations

        show_allocations(compared, top)


def _share(text: str) -> float:
    """Reads a percentage.

    Raises:
        UsageError: It is none.
    """
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--tolerance {text!r} is not a percentage from 0% to 100%, such as 0.5%.")
    return share


def _draw(compared: AllocationComparison, path: str) -> None:
    """Writes the figure of a comparison.

    Raises:
        UsageError: The file cannot be written.
    """
    from memprof.cli.pages.allocations_page import draw_timelines
    from memprof.trace.files.whole_file import whole_file

    real, dry = compared.real, compared.dry
    title = f"Live bytes after each allocation: {compared.equal:,} of {len(real):,} equal"
    marks = [(gap.real_from, gap.real_to) for gap in compared.gaps]
    try:
        with whole_file(Path(path)) as file:
            file.write(draw_timelines(title, real.live, dry.live, marks).encode())
    except OSError as error:
        raise UsageError(f"--figure {path} cannot be written ({error.strerror or error}).") from None


def _dry_run(real: AllocationSequence, words: list[str], device: str, folder: Path) -> AllocationComparison:
    """Dry-runs the script, which writes its snapshots to a folder, and compares the one of the real run's name."""
    from memprof.analysis.compared.allocation_sequence import read_sequence
    from memprof.analysis.compared.comparison import compare_sequences
    from memprof.launch.dry.dry_snapshots import collect_snapshots
    from memprof.launch.parent.target import find_target
    from memprof.machines.card import find_card

    name = find_card(device).machine.name
    is_module = words[0] == "-m"
    target = find_target(tuple(words[1:] if is_module else words), is_module=is_module, is_command=False)
    notify(f"dry-running {target.name} on {name}")
    snapshot = Path(real.source).name
    taken = collect_snapshots(target, name, snapshot, folder)
    named = [path for path in taken if path.name.partition("-")[2] == snapshot]
    compared = [compare_sequences(real, read_sequence(str(path))) for path in named[-1:] or taken]
    return max(compared, key=lambda one: one.equal)
