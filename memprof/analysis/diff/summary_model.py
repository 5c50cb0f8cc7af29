"""The summary of a recording: each phase's fullest moment, split every way; as JSON small enough to commit.

The largest parts of each kind are listed one by one and the rest as one part, so that they still sum to the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memprof.analysis.diff.traits import Traits
from memprof.analysis.report.module_tree import fold_alike, has_range, names_in
from memprof.analysis.report.splits import KINDS
from memprof.errors import BadInputError
from memprof.trace.files.reading import parse_json

#: Name of the fullest moment overall, whatever its phase.
PEAK = "peak"
#: Name for the parts that are not listed one by one.
OTHERS = "(others)"
T = TypeVar("T", list[Any], dict[str, int])
V = TypeVar("V")
#: Schema version.
SUMMARY_SCHEMA = 1
#: Parts of each kind listed one by one in JSON: at the peak, and at the fullest moments of the phases.
_MOST_AT_PEAK, _MOST_IN_PHASE = 24, 10
#: So many times more modules, repeated layers of equal size as one: a module that is not listed is not found to grow.
_MOST_MODULES = 8


@dataclass(frozen=True)
class Spot:
    """A moment, and its live bytes.

    Attributes:
        bytes: Allocated bytes.
        phase: Its phase.
        op: The operator running.
        module: Its module, by name or the root's type; "" outside any module.
        line: The user's line of code, "" where unknown.
        file: Path of that line's file, as recorded.
        parts: Bytes by part, for each of ``splits.KINDS``; those of a kind sum to ``bytes``.
    """

    bytes: int
    phase: str
    op: str
    module: str
    line: str
    file: str = ""
    parts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The place in words: ``backward of layers.3``."""
        return self.phase + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True)
class Summary:
    """The summary of a recording. See ``docs/diff.md`` for the JSON.

    Attributes:
        name: What was recorded, such as ``train.py``.
        frame: What its memory depends on besides the code: device, torch, CUDA, allocator settings, world size, batch
            (the inputs' shapes), memory events; as text.
        model: Type of the largest root module, "" where there is none.
        plan: The plan it ran under, in words.
        spots: PEAK, and the fullest moment of each phase.
        maxima: Each category's own maximum.
        step_time_us: Duration of a step without the recorder; NaN where unknown.
        recompute_time_us: Duration of the operators recomputed in backward; NaN where unknown.
        reserved_bytes: Peak reserved bytes of the allocator, -1 where it has none.
        parameter_bytes: Bytes of all parameters.
        dtypes: Bytes of each category by element type, at the category's own maximum.
        states: Keys of the optimizer's state, such as ``exp_avg``.
        step_peaks: Peak of each recorded step, in order.
        start_bytes: Allocated before the step's first operator.
        recomputed_ops: Operators recomputed in backward.
        rank_peaks: Peak of the fullest step of each rank.
        is_complete: Whether the recorded steps are complete.
        lines: Source file and line number by line name, for annotations.
        traits: Characteristics of the step besides its bytes.
        growth_bytes: Growth of live memory per step; NaN where unknown.
        host_bytes: Host memory of the job's processes at its fullest; NaN where unknown.
        lower_bound: Why its bytes are only a lower bound, as those of an incomplete history are, a clause; "" where
            they are not.
    """

    name: str
    frame: dict[str, str]
    model: str
    plan: str
    spots: dict[str, Spot]
    maxima: dict[str, int]
    step_time_us: float
    recompute_time_us: float
    reserved_bytes: int
    parameter_bytes: int
    dtypes: dict[str, dict[str, int]]
    states: tuple[str, ...]
    step_peaks: tuple[int, ...]
    start_bytes: int
    recomputed_ops: int
    rank_peaks: dict[str, int]
    is_complete: bool
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    traits: Traits = field(default_factory=Traits)
    growth_bytes: float = math.nan
    host_bytes: float = math.nan
    lower_bound: str = ""

    @property
    def peak(self) -> Spot:
        """The fullest moment."""
        return self.spots[PEAK]


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """Returns a summary ready for ``json.dump``: a few kilobytes, the smallest parts and like layers summed."""
    record = dataclasses.asdict(summary)
    kept_lines = set()
    for name, spot in record["spots"].items():
        most = _MOST_AT_PEAK if name == PEAK else _MOST_IN_PHASE
        spot["file"] = ""
        spot["parts"] = {
            kind: _largest(_fold_layers(parts), _MOST_MODULES * most) if kind == "module" else _largest(parts, most)
            for kind, parts in spot["parts"].items()
        }
        kept_lines |= set(spot["parts"]["source"])
    # Files relative to the job's folder: a baseline is committed and read elsewhere.
    record["lines"] = {
        place: [place.rpartition(":")[0], line] for place, (_, line) in summary.lines.items() if place in kept_lines
    }
    for key in ("step_time_us", "recompute_time_us"):
        record[key] = round(record[key], 1) if math.isfinite(record[key]) else None
    for key in ("growth_bytes", "host_bytes"):
        record[key] = None if math.isnan(record[key]) else int(record[key])
    record["traits"] = summary.traits.to_json()
    return {"memprof_summary": SUMMARY_SCHEMA, **record}


def read_summary(text: str, name: str) -> Summary:
    """Reads the output of ``summary_to_json``.

    Raises:
        BadInputError: It is not a summary, is of a later version, or contains an invalid value.
    """
    try:
        record = parse_json(text, constants=True)
    except ValueError as error:
        raise BadInputError(
            f"{name} is neither a recording nor JSON from memprof export --to summary: {error}."
        ) from error
    version = record.get("memprof_summary") if isinstance(record, dict) else None
    if type(version) is not int:
        raise BadInputError(f"{name} is JSON, but not from memprof export --to summary: it has no key memprof_summary.")
    if version != SUMMARY_SCHEMA:
        raise BadInputError(
            f"{name} is a summary of version {version}; this memprof reads version {SUMMARY_SCHEMA}: recreate it with "
            "memprof export --to summary."
        )
    try:
        return _read(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{name} is damaged: {type(error).__name__} at {str(error)[:100]}.") from error


def _read(record: Mapping[str, Any]) -> Summary:
    spots = {
        str(name): Spot(
            bytes=_typed(spot["bytes"], int),
            **{key: _typed(spot[key], str) for key in ("phase", "op", "module", "line", "file")},
            parts={str(kind): _counts(parts) for kind, parts in spot["parts"].items()},
        )
        for name, spot in record["spots"].items()
    }
    for spot in spots.values():
        for kind in KINDS:
            if sum(spot.parts[kind].values()) != spot.bytes:
                raise ValueError(f"the parts by {kind}, which do not sum to {spot.bytes}")
        spot.parts["module"] = _unfold_layers(spot.parts["module"])
    if spots[PEAK].phase not in spots:
        raise KeyError(spots[PEAK].phase)
    return Summary(
        name=_typed(record["name"], str),
        frame={str(key): _typed(value, str) for key, value in record["frame"].items()},
        model=_typed(record["model"], str),
        plan=_typed(record["plan"], str),
        spots=spots,
        maxima=_counts(record["maxima"]),
        step_time_us=_time(record["step_time_us"]),
        recompute_time_us=_time(record["recompute_time_us"]),
        **{
            key: _typed(record[key], int)
            for key in ("reserved_bytes", "parameter_bytes", "start_bytes", "recomputed_ops")
        },
        dtypes={str(key): _counts(value) for key, value in record["dtypes"].items()},
        states=tuple(_typed(key, str) for key in _typed(record["states"], list)),
        step_peaks=tuple(_typed(value, int) for value in _filled(_typed(record["step_peaks"], list))),
        rank_peaks=_filled(_counts(record["rank_peaks"])),
        is_complete=_typed(record["is_complete"], bool),
        lines={str(key): (_typed(file, str), _typed(line, int)) for key, (file, line) in record["lines"].items()},
        traits=Traits.from_json(record["traits"]),
        growth_bytes=_time(record.get("growth_bytes")),  # not in summaries of earlier versions
        host_bytes=_time(record.get("host_bytes")),  # nor this
        lower_bound=_typed(record.get("lower_bound", ""), str),
    )


def _typed(value: Any, kind: type[V]) -> V:
    if type(value) is not kind:
        raise TypeError(f"{value!r}: not of type {kind.__name__}")
    return value


def _time(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r}: not a time")
    return float(value)


def _filled(values: T) -> T:
    if not values:
        raise ValueError("an empty list of peaks")
    return values


def _counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(key): _typed(value, int) for key, value in values.items()}


def _largest(parts: Mapping[str, int], most: int) -> dict[str, int]:
    rest = parts.get(OTHERS, 0)
    named = ((name, size) for name, size in parts.items() if name != OTHERS)
    ordered = sorted(named, key=lambda part: (-part[1], part[0]))
    kept = ordered if len(ordered) + bool(rest) <= most else ordered[: most - 1]
    rest += sum(size for _, size in ordered[len(kept) :])
    return dict(kept) | ({OTHERS: rest} if rest or len(kept) < len(ordered) else {})


def _fold_layers(parts: Mapping[str, int]) -> dict[str, int]:
    """Sums layers of equal size under a name with ranges; names that look like one are summed with the others."""
    own = {name: size for name, size in parts.items() if not has_range(name)}
    folded = {title: sum(own[name] for name in names) for title, names in fold_alike(own)}
    rest = sum(parts.values()) - sum(own.values())
    return folded | ({OTHERS: folded.get(OTHERS, 0) + rest} if rest else {})


def _unfold_layers(parts: Mapping[str, int]) -> dict[str, int]:
    """Divides what ``_fold_layers`` summed; summaries of earlier versions have each layer by itself."""
    found: dict[str, int] = {}
    for title, size in parts.items():
        names = names_in(title)
        found |= dict.fromkeys(names, size // len(names)) if size % len(names) == 0 else {title: size}
    return found
