"""The row that `memprof compare-allocations --row` prints: one of the table in docs/how-true.md."""

from __future__ import annotations

from memprof.analysis.compared.comparison import AllocationComparison
from memprof.units import format_bytes

#: Columns of the table.
COLUMNS = (
    "run",
    "card, torch",
    "allocations of the GPU",
    "equal, in order",
    "more in the dry run",
    "peak of the GPU",
    "error of the peak",
    "of the end",
    "of reserved memory",
)


def describe_row(compared: AllocationComparison, device: str) -> str:
    """Returns a comparison as a row of Markdown, without names of files or paths of the user's.

    Args:
        compared: The two sequences.
        device: The simulated device; "" where both files existed.
    """
    real, dry = compared.real, compared.dry
    error = compared.reserved_error_bytes
    cells = (
        "(what the script does)",
        f"{device or '(card)'}, {real.torch or '(version)'}, dry run with {dry.torch or '(version)'}",
        f"{len(real):,}",
        f"{compared.equal:,}",
        f"{len(dry) - compared.equal:,}",
        format_bytes(real.peak_bytes),
        _error(compared.peak_error_bytes, real.peak_bytes),
        _error(dry.end_bytes - real.end_bytes, real.end_bytes),
        "unknown" if error is None else _error(error, real.peak_reserved_bytes),
    )
    return f"| {' | '.join(cells)} |"


def _error(error: int, real_bytes: int) -> str:
    if not error:
        return "0 B"
    share = f" ({100 * error / real_bytes:+.2f} %)" if real_bytes else ""
    return f"{error:+,} B{share}"
