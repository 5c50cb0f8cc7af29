"""`memprof diff --allocations`: what a real device allocated beside what a dry run does, allocation by allocation."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.compared.allocation_sequence import AllocationSequence
    from memprof.analysis.compared.comparison import AllocationComparison


def compare_allocations(
    snapshot: str,
    rest: Sequence[str],
    *,
    machine: str | None,
    tolerance: str,
    rows: int,
    figure: str | None,
    in_dashboard: bool,
    form: str,
) -> int:
    """Prints a comparison of a real GPU's allocations with a dry run's, and returns the exit code.

    Args:
        snapshot: What the job wrote on a GPU.
        rest: A snapshot or a recording; with a device the job's script and its arguments.
        machine: The GPU to simulate; None where both files exist.
        tolerance: Largest error of the peak, a percentage.
        rows: Kinds of differences to list at most.
        figure: SVG file to draw both sides' live bytes to; None for none.
        in_dashboard: Show both sides in a browser.
        form: text, json, or markdown: one row of the table in docs/how-true.md.

    Raises:
        BadInputError: A file cannot be read, or has no history.
        UsageError: There is nothing to compare with, or the figure cannot be written.
    """
    share = _share(tolerance)
    rest = rest[1:] if rest[:1] == ("--",) else rest
    if not rest:
        raise UsageError(
            f"nothing to compare the allocations of {snapshot} with: name another snapshot, or add --device rtx4090 -- "
            "train.py"
        )
    from memprof.analysis.compared.allocation_sequence import read_sequence
    from memprof.analysis.compared.comparison import compare_sequences
    from memprof.errors import GateFailedError

    if find_spec("rapidfuzz") is None:
        raise UsageError("comparing allocations needs rapidfuzz: pip install 'torch-memprof[compare]'")
    if in_dashboard:
        importlib.import_module("memprof_dashboard.command").require_dash()
    real = read_sequence(snapshot)
    with ExitStack() as stack:
        if machine is None:
            if len(rest) > 1 or rest[0].endswith(".py"):
                raise UsageError("to dry-run a script, name the GPU of the snapshot: --device rtx4090.")
            compared = compare_sequences(real, read_sequence(rest[0]))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-compare-"))
            compared = _dry_run(real, list(rest), machine, Path(folder))
        _show(compared, machine or "", rows, figure, form)
        if in_dashboard:
            importlib.import_module("memprof_dashboard.command").show_allocations(
                Path(snapshot), Path(compared.dry.source)
            )
    return 0 if compared.peak_is_within(share) else GateFailedError.exit_code


def _show(compared: AllocationComparison, device: str, rows: int, figure: str | None, form: str) -> None:
    if figure is not None:
        _draw(compared, figure)
    if form == "json":
        from memprof.analysis.compared.comparison_words import comparison_to_json

        print(json.dumps(comparison_to_json(compared), indent=2, allow_nan=False))
    elif form == "markdown":
        from memprof.cli.pages.allocations_page import describe_row

        print(describe_row(compared, device))
    else:
        from memprof.cli.pages.allocations_page import show_allocations

        show_allocations(compared, rows)


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
    from memprof.launch.dry.dry_outcome import collect_snapshots
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
