"""What a recording comes to, small enough to be committed: each phase's fullest moment, split every way, and its frame.

A diff compares two of these. Made of a recording it holds every part; written as JSON, the largest parts of each kind
and the sum of the others, so that the parts still sum to the whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from memprof.analysis.basis import steady_step
from memprof.analysis.breakdown import Breakdown, Holding, by_category, by_module, by_op, by_source, hold_at
from memprof.analysis.module_tree import module_tree
from memprof.analysis.moments import Moment, find_category_maxima, find_peak, find_phase_peaks
from memprof.analysis.predict import has_untouched_step
from memprof.analysis.sources import find_sources
from memprof.analysis.traits import Traits, rounds_of, traits_of
from memprof.errors import BadInputError, PolicyError
from memprof.policies.plan_tables import plan_from_tables
from memprof.replay.live import live_bytes
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace

K = TypeVar("K", bound=Hashable)

#: Version of the JSON below.
SUMMARY_SCHEMA = 1

#: What a moment is split by. ``storage``: each storage by itself, by module, operator and occurrence.
KINDS = ("category", "module", "op", "source", "storage")

#: Name of the fullest moment of all, whatever phase it is in.
PEAK = "peak"

#: What the parts that are not told one by one are called, and those that belong to nothing of the kind.
OTHERS = "(others)"
NOTHING = "(none)"

#: Parts of each kind that JSON tells one by one: at the peak, and at the fullest moments of the phases.
_MOST_AT_PEAK, _MOST_IN_PHASE = 24, 10


@dataclass(frozen=True)
class Spot:
    """A moment, and what is held there.

    Attributes:
        bytes: Allocated bytes.
        phase: Its phase.
        op: The operator that runs.
        module: Its module, by name or the root's type; "" outside of any.
        line: The user's line of code, "" where none is known.
        file: The path of that line's file as recorded.
        parts: Bytes by part, for each of KINDS; those of a kind sum to ``bytes``.
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
        """Where it is: ``backward of layers.3``."""
        return self.phase + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True)
class Summary:
    """What a recording comes to. See ``docs/diff.md`` for the JSON.

    Attributes:
        name: What was recorded, such as ``train.py``.
        frame: What its memory depends on beside the code: device, torch, CUDA, allocator settings, world size, batch
            (the inputs' shapes), memory events; as text.
        model: Type of the largest root module, "" where there is none.
        plan: The plan it ran under, in words.
        spots: PEAK, and the fullest moment of each phase.
        maxima: Each category's own maximum.
        step_time_us: How long a step takes without the recorder; NaN where unknown.
        recompute_time_us: Time of the operators that run again in backward; NaN where unknown.
        reserved_bytes: Most bytes the allocator held, -1 where it has no such number.
        parameter_bytes: Bytes of all parameters.
        dtypes: Bytes at the peak by category and element type.
        states: Keys of the optimizer's state, such as ``exp_avg``.
        step_peaks: Peak of each recorded step, in order.
        start_bytes: Allocated before the step's first operator.
        recomputed_ops: Operators that run again in backward.
        rank_peaks: Peak of the steady step by rank, of all ranks.
        is_complete: Whether the recording saw its steps to their end.
        lines: Source file and line number by the name of a line, for annotations.
        traits: What the step is like beside its bytes.
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

    @property
    def peak(self) -> Spot:
        """The fullest moment."""
        return self.spots[PEAK]


def summarise(trace: Trace) -> Summary:
    """Sums a recording up: the steady step of the rank with the highest peak.

    Raises:
        BadInputError: It holds no operators, or is damaged.
        InconclusiveError: No step was recorded to its end.
    """
    peaks = {}
    for number in trace.ranks:
        rank = trace.rank_trace(number)
        peaks[str(number)] = int(live_bytes(steady_step(rank, None)).during.max(initial=0))
    worst = trace.rank_trace(int(max(peaks, key=lambda number: peaks[number])))
    step = steady_step(worst, None)
    if not len(step.ops):
        raise BadInputError(f"{trace.path}: step {step.number} holds no operators.")
    made = summarise_step(step, worst.manifest)
    is_known = has_untouched_step(worst) or worst.manifest.backend.name == PREDICTED
    return dataclasses.replace(
        made,
        step_time_us=step.duration_us if is_known else math.nan,
        rank_peaks=peaks,
        step_peaks=tuple(int(live_bytes(worst.step(number)).during.max(initial=0)) for number in worst.recorded_steps),
        is_complete=worst.manifest.capture.is_complete,
    )


def summarise_step(step: Step, manifest: Manifest | None = None) -> Summary:
    """Sums one step up, durations as they stand in it.

    Args:
        step: The step; it has operators.
        manifest: What its recording says about itself.
    """
    manifest = manifest or Manifest()
    sources, tree = find_sources(step.stacks), module_tree(step.modules)
    moments = {PEAK: find_peak(step, sources)} | {one.phase: one for one in find_phase_peaks(step, sources)}
    spots: dict[str, Spot] = {}
    lines: dict[str, tuple[str, int]] = {}
    for name, moment in moments.items():
        holding = hold_at(step, moment.op_id)
        by_line = by_source(holding, sources)
        lines |= {part.key.place: (part.key.file, part.key.line) for part in by_line.parts if part.key is not None}
        spots[name] = _spot(
            moment,
            {
                "category": _sums(by_category(holding), str),
                "module": _sums(by_module(holding, tree), tree.title),
                "op": _sums(by_op(holding), str),
                "source": _sums(by_line, lambda line: line.place),
                "storage": _by_storage(holding, tree.title, tree.nodes_of),
            },
        )
    again = step.ops.is_recompute
    recompute = step.ops.duration_us[again]
    peak = hold_at(step, moments[PEAK].op_id)
    reserved = int(step.memory.reserved_bytes.max(initial=-1))
    return Summary(
        name=manifest.target,
        frame=_frame(step, manifest),
        model=_model(step),
        plan=_plan(manifest),
        spots=spots,
        maxima={name: one.maximum_bytes for name, one in find_category_maxima(step).items()},
        step_time_us=step.duration_us,
        recompute_time_us=float(recompute.sum()) if not np.isnan(recompute).any() else math.nan,
        reserved_bytes=reserved,
        parameter_bytes=int(step.modules.parameter_bytes.sum()),
        dtypes=_dtypes(peak),
        states=_states(step),
        step_peaks=(spots[PEAK].bytes,),
        start_bytes=step.bytes_at_start(),
        recomputed_ops=int(again.sum()),
        rank_peaks={str(manifest.rank): spots[PEAK].bytes},
        is_complete=True,
        lines=lines,
        traits=traits_of(step, sources),
    )


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """Returns a summary ready for ``json.dump``: a few kilobytes, the smallest parts summed up."""
    record = dataclasses.asdict(summary)
    kept_lines = set()
    for name, spot in record["spots"].items():
        most = _MOST_AT_PEAK if name == PEAK else _MOST_IN_PHASE
        spot["file"] = ""
        spot["parts"] = {kind: _largest(parts, most) for kind, parts in spot["parts"].items()}
        kept_lines |= set(spot["parts"]["source"])
    # Files by their place below the job's own folder: a baseline is committed, and read elsewhere.
    record["lines"] = {
        place: [place.rpartition(":")[0], line] for place, (_, line) in summary.lines.items() if place in kept_lines
    }
    for key in ("step_time_us", "recompute_time_us"):
        record[key] = round(record[key], 1) if math.isfinite(record[key]) else None
    record["traits"] = summary.traits.to_json()
    return {"memprof_summary": SUMMARY_SCHEMA, **record}


def read_summary(text: str, name: str) -> Summary:
    """Reads what ``summary_to_json`` made.

    Args:
        text: The file's content.
        name: What it is called, for the sentence.

    Raises:
        BadInputError: It is no summary, of a later version, or something in it makes no sense.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{name} is neither a recording nor the JSON of memprof summary.") from error
    version = record.get("memprof_summary") if isinstance(record, dict) else None
    if type(version) is not int:
        raise BadInputError(f"{name} is JSON, but not of memprof summary: it has no memprof_summary.")
    if version != SUMMARY_SCHEMA:
        raise BadInputError(
            f"{name} is a summary of version {version}; this memprof reads version {SUMMARY_SCHEMA}: make it anew with "
            "memprof summary."
        )
    try:
        return _read(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{name} is damaged: {type(error).__name__} at {error}.") from error


def _read(record: Mapping[str, Any]) -> Summary:
    spots = {
        str(name): Spot(
            bytes=_whole(spot["bytes"]),
            **{key: _text(spot[key]) for key in ("phase", "op", "module", "line", "file")},
            parts={str(kind): _counts(parts) for kind, parts in spot["parts"].items()},
        )
        for name, spot in record["spots"].items()
    }
    for spot in spots.values():
        for kind in KINDS:
            if sum(spot.parts[kind].values()) != spot.bytes:
                raise ValueError(f"the parts by {kind}, which do not sum to {spot.bytes}")
    if PEAK not in spots:
        raise KeyError(PEAK)
    return Summary(
        name=_text(record["name"]),
        frame={str(key): _text(value) for key, value in record["frame"].items()},
        model=_text(record["model"]),
        plan=_text(record["plan"]),
        spots=spots,
        maxima=_counts(record["maxima"]),
        step_time_us=_time(record["step_time_us"]),
        recompute_time_us=_time(record["recompute_time_us"]),
        **{key: _whole(record[key]) for key in ("reserved_bytes", "parameter_bytes", "start_bytes", "recomputed_ops")},
        dtypes={str(key): _counts(value) for key, value in record["dtypes"].items()},
        states=tuple(_text(key) for key in record["states"]),
        step_peaks=tuple(_whole(value) for value in record["step_peaks"]),
        rank_peaks=_counts(record["rank_peaks"]),
        is_complete=bool(record["is_complete"]),
        lines={str(key): (_text(file), _whole(line)) for key, (file, line) in record["lines"].items()},
        traits=Traits.from_json(record["traits"]),
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r}, which is no whole number")
    return value


def _time(value: Any) -> float:
    return math.nan if value is None else float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r}, which is no text")
    return value


def _counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(key): _whole(value) for key, value in values.items()}


def _spot(moment: Moment, parts: dict[str, dict[str, int]]) -> Spot:
    source = moment.source
    return Spot(
        bytes=moment.allocated_bytes,
        phase=moment.phase,
        op=moment.op,
        module=moment.module_title or "",
        line="" if source is None else source.place,
        file="" if source is None else source.file,
        parts=parts,
    )


def _sums(split: Breakdown[K], name_of: Callable[[K], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for part in split.parts:
        sums[NOTHING if part.key is None else name_of(part.key)] += part.bytes
    return dict(sums)


def _by_storage(holding: Holding, title: Callable[[int], str], nodes_of: Callable[[Any], Any]) -> dict[str, int]:
    """Splits by storage; each is named by what made it and where, and the how-manieth of that it is."""
    step, rows = holding.step, holding.rows
    storages = step.storages
    nodes = nodes_of(storages.module_id[rows]).tolist()
    seen: Counter[str] = Counter()
    sums: dict[str, int] = {}
    for row, node, maker, size in zip(
        rows.tolist(), nodes, holding.makers.tolist(), holding.bytes.tolist(), strict=True
    ):
        module = title(node) if node != NONE else ""
        made = str(step.ops.name[maker]) if maker != NONE else str(storages.category[row])
        name = str(storages.name[row])
        key = f"{storages.category[row]} {name}" if name else " ".join(filter(None, (module, made)))
        seen[key] += 1
        sums[f"{key} #{seen[key]}"] = size
    if holding.workspace_bytes:
        sums[f"workspace of {step.ops.name[holding.op_id]}"] = holding.workspace_bytes
    return sums


def _largest(parts: Mapping[str, int], most: int) -> dict[str, int]:
    ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    if len(ordered) <= most:
        return dict(ordered)
    return dict(ordered[: most - 1]) | {OTHERS: sum(size for _, size in ordered[most - 1 :])}


def _frame(step: Step, manifest: Manifest) -> dict[str, str]:
    machine = manifest.machine
    storages = step.storages
    is_input = (storages.category == "input") & (storages.shape != "")
    # Each shape once: how many of them are alive depends on which names the job still holds them by.
    shapes = sorted(set(storages.shape[is_input].tolist()))
    frame = {
        "device": machine.device_name or machine.device_kind,
        "torch": manifest.torch_version,
        "CUDA": machine.cuda,
        "allocator settings": machine.allocator_settings,
        "world size": str(manifest.world_size),
        "memory events": manifest.backend.name,
        "batch": ", ".join(shapes[:8]),
        "micro-batches": str(rounds_of(step)),
    }
    return {name: value for name, value in frame.items() if value}


def _model(step: Step) -> str:
    roots = np.flatnonzero(step.modules.parent_id == NONE)
    if not len(roots):
        return ""
    tree = module_tree(step.modules)
    sizes = tree.with_children(tree.sum_by_node(step.modules.module_id, step.modules.parameter_bytes))
    return str(step.modules.type[max(roots.tolist(), key=lambda root: int(sizes[tree.node_of_module[root]]))])


def _plan(manifest: Manifest) -> str:
    try:
        return plan_from_tables(manifest.plan).describe() if manifest.plan else ""
    except PolicyError:
        return "one that this version of memprof cannot read"


def _dtypes(holding: Holding) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    storages = holding.step.storages
    for row, size in zip(holding.rows.tolist(), holding.bytes.tolist(), strict=True):
        by_type = sums.setdefault(str(storages.category[row]), {})
        dtype = str(storages.dtype[row]) or "unknown"
        by_type[dtype] = by_type.get(dtype, 0) + size
    return sums


def _states(step: Step) -> tuple[str, ...]:
    names = step.storages.name[step.storages.category == "optimizer_state"]
    return tuple(sorted({str(name).rpartition(".")[2] for name in names if name}))
