"""Gates: limits on memory and time that a change must not exceed, such as ``peak>+2%&+128MiB``."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from memprof.analysis.diff.summary_model import Spot, Summary
from memprof.errors import UsageError
from memprof.phases import PHASES, in_order, is_own_name
from memprof.trace.schema import CATEGORIES
from memprof.units import format_bytes, format_bytes_change, format_us, parse_bytes

#: Measures gated by name alone, and their unit.
MEASURES = {
    "peak": "bytes",
    "reserved": "bytes",
    "reserved-allocated": "bytes",
    "host_peak": "bytes",
    "growth": "bytes",
    "step_time": "us",
    "recompute_time": "us",
    **dict.fromkeys(CATEGORIES, "bytes"),
}
#: Measures gated by a kind and a name or pattern: ``module:layers.*``.
KINDS = ("module", "phase", "category")

_LIMIT = re.compile(r"\s*(?P<sign>\+?)\s*(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>%|[A-Za-z]*)\s*", re.ASCII)
_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True)
class Limit:
    """One bound of a gate.

    Attributes:
        amount: Bytes, microseconds, or a share (0.02 is 2 %).
        is_share: Whether ``amount`` is a share of the base.
        is_growth: Whether it limits the growth; otherwise the value itself.
    """

    amount: float
    is_share: bool
    is_growth: bool

    def is_passed(self, base: float, head: float) -> bool:
        """Whether a value exceeds this limit. Any increase from 0 exceeds a relative limit."""
        if self.is_share:
            return head - base > self.amount * base
        return (head - base if self.is_growth else head) > self.amount


@dataclass(frozen=True)
class Gate:
    """A condition that fails where a measure exceeds all of its limits.

    Attributes:
        text: The gate as written.
        kind: ``""`` for a measure with its own name, or one of KINDS.
        name: The measure, or the name after the kind: a phase, a category, a module pattern.
        limits: Limits that must all be exceeded for the gate to fail.
    """

    text: str
    kind: str
    name: str
    limits: tuple[Limit, ...]

    @property
    def unit(self) -> str:
        """``bytes`` or ``us``."""
        return MEASURES.get(self.name, "bytes") if not self.kind else "bytes"

    @property
    def needs_base(self) -> bool:
        """Whether it compares with a base."""
        return any(limit.is_growth for limit in self.limits)

    def judge(self, base: float, head: float, *, least_base: str = "", least_head: str = "") -> Verdict:
        """Checks a measure against the gate.

        Args:
            base: Its value in the base; NaN where unknown.
            head: Its value in the head; NaN where unknown.
            least_base: Why bytes of the base are only a lower bound; "" where they are not.
            least_head: The same of the head.
        """
        if math.isnan(head) or (self.needs_base and math.isnan(base)):
            return Verdict(self, base, head, is_known=False, is_failed=False)
        is_failed = all(limit.is_passed(base, head) for limit in self.limits)
        why = (least_base if self.needs_base else "") if is_failed else least_head
        if why and self.unit == "bytes" and self.name != "growth":
            return Verdict(self, base, head, is_known=False, is_failed=False, why=why)
        return Verdict(self, base, head, is_known=True, is_failed=is_failed)


@dataclass(frozen=True)
class Verdict:
    """The result of a gate on a change.

    Attributes:
        gate: The gate.
        base: The measure in the base.
        head: The measure in the head.
        is_known: Whether it could be evaluated.
        is_failed: Whether it failed.
        why: Why it is undecided where the measure is only a lower bound; "" elsewhere.
    """

    gate: Gate
    base: float
    head: float
    is_known: bool
    is_failed: bool
    why: str = ""

    @property
    def is_undecided(self) -> bool:
        """Whether the gate is not passed, nor failed: a lower bound, or growth over too few steps to know it."""
        return not self.is_known and (self.gate.name == "growth" or bool(self.why))

    def describe(self) -> str:
        """Returns the result in words: ``peak 1.20 GiB -> 1.50 GiB (+307.20 MiB, +25.0 %)``."""
        label = f"{self.gate.kind}:{self.gate.name}" if self.gate.kind else self.gate.name
        if self.why:
            return f"{label} is undecided, at least {format_bytes(self.head)}: {self.why}"
        if self.is_undecided:
            return (
                "growth is undecided, these steps are too few: record more of them (`memprof record --steps 12`), or "
                "the whole run (`memprof record --light`)"
            )
        if not self.is_known:
            return f"{label} is unknown on at least one side"
        write: Callable[[float], str] = format_us if self.gate.unit == "us" else format_bytes
        if not self.gate.needs_base or math.isnan(self.base):
            return f"{label} {write(self.head)}"
        grown = self.head - self.base
        change = (
            format_bytes_change(grown) if self.gate.unit == "bytes" else f"{'+' if grown > 0 else ''}{write(grown)}"
        )
        share = f", {100 * grown / self.base:+.1f} %" if self.base else ""
        return f"{label} {write(self.base)} -> {write(self.head)} ({change}{share})"


def measure(gate: Gate, summary: Summary, spot: Spot | None = None) -> float:
    """Returns the value a gate checks; NaN where a recording does not contain it.

    Args:
        gate: The gate.
        summary: The recording.
        spot: The moment at which modules are measured; the peak where left out.
    """
    if gate.kind == "phase":
        return float(summary.spots[gate.name].bytes) if gate.name in summary.spots else 0.0
    if gate.kind == "module":
        return float(_of_module(gate.name, (spot or summary.peak).parts["module"]))
    if gate.kind == "category" or gate.name in summary.maxima:
        return float(summary.maxima.get(gate.name, 0))
    if gate.name == "peak":
        return float(summary.peak.bytes)
    if gate.name == "host_peak":
        return summary.host_bytes
    if gate.name == "step_time":
        return summary.step_time_us
    if gate.name == "recompute_time":
        return summary.recompute_time_us
    if gate.name == "growth":
        return summary.growth_bytes
    if gate.name in ("reserved", "reserved-allocated"):
        if summary.reserved_bytes < 0:
            return math.nan
        return float(summary.reserved_bytes - (summary.peak.bytes if gate.name == "reserved-allocated" else 0))
    return 0.0  # an empty category


def parse_gate(text: str) -> Gate:
    """Parses a gate.

    ``peak>+2%``, ``peak>+256MiB``, ``peak>24GiB``, ``peak>+2%&+128MiB`` (both must be exceeded), ``activation>+5%``,
    ``module:layers.*>+100MiB``, ``phase:backward>+3%``, ``reserved-allocated>+1GiB``, ``step_time>+10%``.

    Raises:
        UsageError: Invalid gate; the message shows the position of the error.
    """
    measure, sign, limits = text.partition(">")
    if not sign:
        raise _wrong(text, len(text), "a gate needs '>', as in peak>+2%")
    kind, colon, name = (part.strip() for part in measure.partition(":"))
    if not colon:
        kind, name = "", kind
        if name not in MEASURES:
            raise _wrong(
                text, 0, f"unknown measure {name!r}; choose from {', '.join(MEASURES)}, module:NAME, phase:NAME"
            )
    elif kind not in KINDS:
        raise _wrong(text, 0, f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    elif not name or not _is_named(kind, name):
        phases = f"; choose from {', '.join(PHASES)}, or a phase the job defines"
        known = {"phase": phases, "category": f"; choose from {', '.join(CATEGORIES)}"}
        raise _wrong(text, len(kind) + 1, f"invalid {kind} {name!r}{known.get(kind, ': name one')}")
    unit = MEASURES[name] if not kind else "bytes"
    place = len(measure) + 1
    found = []
    for part in limits.split("&"):
        found.append(_limit(text, part, place, unit))
        place += len(part) + 1
    return Gate(text.strip(), kind, name, tuple(found))


def require_phases(gates: Iterable[Gate], phases: Iterable[str]) -> None:
    """Refuses gates on a phase that no recording has: a misspelled name would never fail.

    Raises:
        UsageError: Names the first such gate. The recorder's own phases may be missing.
    """
    known = in_order(phases)
    for gate in gates:
        if gate.kind == "phase" and gate.name not in (*PHASES, *known):
            reason = f"no recording has a phase {gate.name!r}; choose from {', '.join(known)}"
            raise _wrong(gate.text, len("phase:"), reason)


def _is_named(kind: str, name: str) -> bool:
    if kind == "phase":
        return name in PHASES or is_own_name(name)
    return kind != "category" or name in CATEGORIES


def _limit(text: str, part: str, place: int, unit: str) -> Limit:
    match = _LIMIT.fullmatch(part)
    if match is None:
        raise _wrong(text, place, f"invalid limit {part.strip()!r}: write +2%, +128MiB or 24GiB")
    is_growth, number, suffix = bool(match["sign"]), float(match["number"]), match["unit"]
    if suffix == "%":
        if not is_growth:
            raise _wrong(text, place, f"a share needs a base: write +{part.strip()} for growth")
        return Limit(number / 100, is_share=True, is_growth=True)
    if unit == "us":
        if suffix not in _US:
            raise _wrong(text, place, f"invalid time {part.strip()!r}: write +10%, +5ms or 2s")
        return Limit(number * _US[suffix], is_share=False, is_growth=is_growth)
    try:
        size = parse_bytes(f"{match['number']}{suffix}")
    except UsageError:
        raise _wrong(text, place, f"invalid size {part.strip()!r}: write +2%, +128MiB or 24GiB") from None
    return Limit(float(size), is_share=False, is_growth=is_growth)


def _wrong(text: str, place: int, what: str) -> UsageError:
    """Returns an error that shows the position by quoting the text before it."""
    shown = f"{text[:place]}[here]{text[place:]}"
    return UsageError(f"invalid gate {shown!r}: {what}.")


def _of_module(pattern: str, modules: Mapping[str, int]) -> int:
    """Sums the modules that match a pattern, and their descendants."""
    return sum(
        size
        for name, size in modules.items()
        if fnmatch.fnmatchcase(name, pattern)
        or any(fnmatch.fnmatchcase(name[:place], pattern) for place, letter in enumerate(name) if letter == ".")
    )
