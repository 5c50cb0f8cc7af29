"""Formats and parses bytes, microseconds and fractions; escapes text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from memprof.errors import UsageError

_BINARY_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL_SUFFIXES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_FACTORS = {suffix.lower(): 1024**power for power, suffix in enumerate(_BINARY_SUFFIXES)} | {
    suffix.lower(): 1000**power for power, suffix in enumerate(_DECIMAL_SUFFIXES)
}
_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<suffix>[A-Za-z]*)\s*", re.ASCII)
_LARGEST_BYTES = 2**63 - 1  # bytes are int64 in every table
_MOST_DIGITS = 100  # more digits change no size, and Python rejects very long integers


def format_bytes(count: int | float) -> str:
    """Formats bytes with a binary unit: ``512 B``, ``1.23 GiB``, ``-4.00 KiB``.

    Args:
        count: Number of bytes, negative for a decrease.
    """
    sign = "-" if round(count) < 0 else ""
    size = abs(count)
    if round(size) < 1024:
        return f"{sign}{round(size)} B"
    for power, suffix in enumerate(_BINARY_SUFFIXES[1:], start=1):
        text = f"{size / 1024**power:.2f}"
        # 1023.999 KiB rounds to 1024.00: use the next unit then.
        if float(text) < 1024 or suffix == _BINARY_SUFFIXES[-1]:
            break
    return f"{sign}{text} {suffix}"


def format_bytes_alike(counts: Sequence[int]) -> str:
    """Formats several byte counts with one unit, that of the largest: ``84.16, 30.72, 9.95 MiB``.

    Args:
        counts: Byte counts, at least one, none negative.
    """
    _, _, suffix = format_bytes(max(counts)).rpartition(" ")
    power = _BINARY_SUFFIXES.index(suffix)
    texts = (f"{count / 1024**power:.2f}" if power else f"{count}" for count in counts)
    return f"{', '.join(texts)} {suffix}"


def format_bytes_change(count: int | float) -> str:
    """Formats a change in bytes with its sign: ``+1.23 GiB``, ``-512 B``, ``0 B``.

    Args:
        count: Bytes gained, negative for a decrease.
    """
    return f"+{format_bytes(count)}" if round(count) > 0 else format_bytes(count)


def format_bytes_of(part: int, whole: int) -> str:
    """Formats bytes as a part of a total, with the unit once where both share it: ``30.20 of 30.70 MiB``.

    Args:
        part: The part.
        whole: The total, or the expected total.
    """
    count, unit = format_bytes(part).split(" ")
    total = format_bytes(whole)
    return f"{count if total.endswith(f' {unit}') else f'{count} {unit}'} of {total}"


def format_bytes_between(least: int, most: int) -> str:
    """Formats a byte range, with the unit once where both share it: ``43.20 to 44.10 MiB``; one figure if equal."""
    return _between(format_bytes(least), format_bytes(most))


def spell_bytes(count: int) -> str:
    """Formats bytes exactly, as an option value: ``24.00GiB``, or ``32191283`` where no unit is exact."""
    text = format_bytes(count).replace(" ", "")
    return text if parse_bytes(text) == count else str(count)


def spell_bytes_below(count: int) -> str:
    """Formats bytes as an option value, rounded down: ``24.00GiB`` for a byte more."""
    text = format_bytes(count).replace(" ", "")
    if parse_bytes(text) <= count:
        return text
    number = _SIZE.fullmatch(text)
    assert number is not None  # matches the format just written
    hundredths = int(number["number"].replace(".", "")) - 1  # two decimals, as format_bytes writes
    return f"{hundredths // 100}.{hundredths % 100:02d}{number['suffix']}"


def parse_bytes(text: str) -> int:
    """Parses a size such as ``24GiB``, ``24 GB``, ``1.5MiB`` or ``1024``.

    Units with an i are binary (1 KiB = 1024 B), those without are decimal (1 kB = 1000 B), upper or lower case; a bare
    number is bytes. Fractions of a byte are truncated, so that a budget never grows by rounding.

    Raises:
        UsageError: Invalid size, or one beyond 8 EiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size: write a number and a unit, such as 24GiB, 1.5 MiB or 80GB")
    suffix = match["suffix"].lower() or "b"
    if suffix in ("k", "m", "g", "t", "p", "e"):
        letter = suffix.upper()
        raise UsageError(
            f"{text!r} can be read in two ways: write {letter}iB for powers of 1024 or {letter}B for powers of 1000"
        )
    if suffix not in _FACTORS:
        raise UsageError(
            f"{text!r} has the unknown unit {match['suffix']!r}: write B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"
        )
    # In integers: the module decimal would leave a context variable in a job.
    whole, _, fraction = match["number"].partition(".")
    whole, fraction = whole.lstrip("0")[:_MOST_DIGITS], fraction[:_MOST_DIGITS]
    size: int = int(f"0{whole}{fraction}") * _FACTORS[suffix] // 10 ** len(fraction)
    if size > _LARGEST_BYTES:
        raise UsageError(f"{text!r} is more than any machine holds: sizes end at 8 EiB")
    return size


def format_count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: ``1 plan``, ``1,200 plans``.

    Args:
        number: The number.
        one: The noun in the singular.
        many: In the plural; by default with an ``s``.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_us(duration_us: float) -> str:
    """Formats a duration with a suitable unit: ``3.4 us``, ``850 us``, ``12.3 ms``, ``1.2 s``.

    Args:
        duration_us: Microseconds; NaN (not measured) gives ``unknown``.
    """
    if math.isnan(duration_us):
        return "unknown"
    sign = "-" if duration_us < 0 else ""
    size = abs(duration_us)
    if round(size, 1) < 10:
        text = f"{size:.1f} us"
    elif round(size) < 1000:
        text = f"{size:.0f} us"
    elif round(size / 1e3, 1) < 1000:
        text = f"{size / 1e3:.1f} ms"
    else:
        text = f"{size / 1e6:.1f} s"
    return sign + text


def format_us_change(change_us: float) -> str:
    """Formats a change of a duration with its sign: ``+1.2 ms``, ``-850 us``, ``0.0 us``.

    Args:
        change_us: Microseconds gained, negative for a decrease; NaN gives ``unknown``.
    """
    return f"+{format_us(change_us)}" if change_us > 0 else format_us(change_us)


def format_us_between(least_us: float, most_us: float) -> str:
    """Formats a range of durations, with the unit once where both share it: ``43.2 to 44.1 ms``."""
    return _between(format_us(least_us), format_us(most_us))


def _between(low: str, high: str) -> str:
    """Joins two formatted figures, each a number and a unit, writing a shared unit only once."""
    count, unit = low.split(" ")
    return high if low == high else f"{count if high.endswith(f' {unit}') else low} to {high}"


def format_percent(fraction: float) -> str:
    """Formats a fraction as a percentage: 0.123 gives ``12.3 %``."""
    return f"{100 * fraction:.1f} %"


def format_percent_change(fraction: float) -> str:
    """Formats a change as a percentage with its sign: 0.123 gives ``+12.3 %``; NaN gives ``unknown``."""
    return f"{100 * fraction:+.1f} %" if math.isfinite(fraction) else "unknown"


def elided(name: str, most: int) -> str:
    """Returns a name of at most so many characters: its middle is left out if it is longer."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[len(name) - half :]}"


def printable(text: str) -> str:
    """Returns a text with every unprintable character escaped.

    Names come from the recorded job: an escape sequence in one is shown, never interpreted by the terminal.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def workflow_text(text: str) -> str:
    """Returns a text as GitHub reads it in a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
