"""Exports a recording as a timeline: live memory above the steps, phases, module calls and operators that ran."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from memprof.analysis.ranks.rank_clocks import align_clocks, match_collectives
from memprof.analysis.report.sources import Sources, find_sources
from memprof.errors import BadInputError
from memprof.replay.history import History
from memprof.trace.exporters.trace_events import (
    CHUNK,
    Events,
    Times,
    as_texts,
    chosen,
    counter,
    earliest_us,
    formatted,
    instant,
    life,
    named_process,
    named_thread,
    quoted,
    slices,
    time_operators,
    write_events,
)
from memprof.trace.files.coded import Coded
from memprof.trace.schema import (
    NONE,
    Bools,
    DeviceMemory,
    HostMemory,
    Ints,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    OutOfMemory,
    RankCollectives,
    Ranks,
    Stacks,
    Steps,
    Storages,
)
from memprof.trace.store import Trace
from memprof.version import __version__

_STEPS, _PHASES, _MODULES, _OPERATORS = 1, 2, 3, 4
_THREADS = {_STEPS: "steps", _PHASES: "phases", _MODULES: "module calls", _OPERATORS: "operators"}


def export_timeline(trace: Trace, ranks: Sequence[int], lives: int, file: BinaryIO) -> None:
    """Writes ranks of a recording as Chrome trace events, each as a process.

    The counters are exact: at every operator the categories sum to ``allocated``, whose maximum is the peak. A value
    holds from the operator's start until the next change, and includes what the operator allocates and frees while it
    runs. Clocks of several machines are aligned as in ``analysis.ranks.rank_clocks``.

    Args:
        trace: The recording.
        ranks: The ranks to export.
        lives: How many of the storages live at a rank's peak to show with their lifetimes, the largest first.
        file: The output file.

    Raises:
        BadInputError: None of the ranks contains an operator or a step, or a table is damaged.
    """
    offsets: dict[int, float] = {}
    if len(trace.ranks) > 1:
        offsets = align_clocks(trace.summary(Ranks), match_collectives(trace.summary(RankCollectives))).offset_us
    starts = [earliest_us(trace.fresh(rank)) + offsets.get(rank, 0.0) for rank in ranks]
    base_us = min((start for start in starts if math.isfinite(start)), default=math.nan)
    if math.isnan(base_us):
        raise BadInputError(f"{trace.path} contains no operators and no steps to export as a timeline.")
    about = {
        "made_by": f"memprof {__version__}",
        "target": trace.manifest.target,
        "torch": trace.manifest.torch_version,
        "zero_is_unix_us": base_us,
    }

    def events() -> Iterator[Events]:
        for place, rank in enumerate(ranks):
            one = trace.fresh(rank)
            yield from _rank_events(one, place, base_us - offsets.get(rank, 0.0), lives)

    write_events(file, events(), about)


def _rank_events(trace: Trace, place: int, base_us: float, lives: int) -> Iterator[Events]:
    process = 100 * (place + 1)  # viewers treat process 0 as idle, and thread N of process N as its main thread
    manifest = trace.manifest
    device = manifest.machine.device_name or manifest.machine.device_kind
    yield named_process(process, f"rank {trace.rank}: {manifest.target or 'job'} on {device}", place)
    for thread, name in _THREADS.items():
        yield named_thread(process, thread, name)
    history, times = History(trace), time_operators(trace, base_us)
    yield from _counters(trace, process, history, times)
    yield from _steps(trace, process, times)
    yield from _phases(process, history, times)
    sources = find_sources(trace.table(Stacks))
    modules = trace.table(Modules)
    yield from _module_calls(trace, process, modules, times)
    yield from _operators(trace, process, modules, sources, history, times)
    yield from _lives(trace, process, modules, sources, history, times, lives)
    failures = trace.table(OutOfMemory)
    for row in range(len(failures)):
        time_ns = int(times.of_us(failures.time_us[[row]])[0])
        requested = int(failures.requested_bytes[row])
        about = {"requested_bytes": requested, "message": failures.message[row]}
        yield [instant(process, "out of memory", time_ns, about)]


def _counters(trace: Trace, process: int, history: History, times: Times) -> Iterator[Events]:
    every = np.arange(history.ops)
    yield from _changes(process, "allocated", times.start_ns, history.total)
    for category in history.categories:
        yield from _changes(process, category, times.start_ns, history.alive_bytes(category, every))
    memory = trace.columns(Memory, "op_id", "time_us", "reserved_bytes")
    known = np.flatnonzero((memory["reserved_bytes"] != NONE) & (memory["op_id"] != NONE))
    if len(known) and history.ops:
        yield from _changes(
            process, "reserved", times.start_ns[memory["op_id"][known]], memory["reserved_bytes"][known]
        )
    host, device = trace.table(HostMemory), trace.table(DeviceMemory)
    for pid in np.unique(host.pid).tolist():
        rows = np.flatnonzero(host.pid == pid)
        name = f"host memory of {host.role[rows[0]]} {pid}"
        yield from _changes(process, name, times.of_us(host.time_us[rows]), host.rss_bytes[rows])
    for kind in sorted(set(device.device.tolist())):
        rows = np.flatnonzero(device.device == kind)
        name = f"used of {kind} by all processes"
        yield from _changes(process, name, times.of_us(device.time_us[rows]), device.used_bytes[rows])


def _changes(process: int, name: str, time_ns: Ints, values: Ints) -> Iterator[Events]:
    kept = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return counter(process, name, time_ns[kept], values[kept])


def _steps(trace: Trace, process: int, times: Times) -> Iterator[Events]:
    steps = trace.table(Steps)
    order = np.argsort(steps.step, kind="stable")
    has_ops = (steps.first_op_id[order] != NONE) & (steps.last_op_id[order] != NONE)
    start, end = times.of_us(steps.start_us[order]), times.of_us(steps.start_us[order] + steps.duration_us[order])
    rows = order[has_ops]
    start[has_ops], end[has_ops] = times.start_ns[steps.first_op_id[rows]], times.end_ns[steps.last_op_id[rows]]
    kept = has_ops | (np.isfinite(steps.start_us[order]) & np.isfinite(steps.duration_us[order]))
    order, start, end = order[kept], start[kept], end[kept]
    end[:-1] = np.minimum(end[:-1], start[1:])  # clocks tie
    is_real = end > start
    order, start, end = order[is_real], start[is_real], end[is_real]
    heads = [f'"name":"step {steps.step[row]}","cat":"step"' for row in order]
    more = [
        f'"kind":{quoted(steps.kind[row])},"micro_batches":{steps.micro_batches[row]},'
        f'"is_complete":{quoted(bool(steps.is_complete[row]))}'
        for row in order
    ]
    return slices(process, _STEPS, start, end, [heads], [more])


def _phases(process: int, history: History, times: Times) -> Iterator[Events]:
    if not history.ops:
        return
    changes = (history.phase[1:] != history.phase[:-1]) | (history.step[1:] != history.step[:-1])
    first = np.append(0, 1 + np.flatnonzero(changes))
    last = np.append(first[1:], history.ops) - 1
    heads = ('"name":', chosen(list(map(quoted, history.phases)), history.phase[first]), ',"cat":"phase"')
    more = ('"step":', history.step[first])
    yield from slices(process, _PHASES, times.start_ns[first], times.end_ns[last], heads, more)


def _module_calls(trace: Trace, process: int, modules: Modules, times: Times) -> Iterator[Events]:
    """Writes calls in order of entry, so that of two that start together the outer one comes first."""
    calls = trace.table(ModuleCalls)
    calls = calls.take((calls.first_op_id != NONE) & (calls.last_op_id != NONE))
    names = [quoted(name) for name in _module_names(modules).values()]
    heads = ('"name":', chosen(names, calls.module_id), ',"cat":"module"')
    more = ('"step":', calls.step, _recomputes(calls.is_recompute))
    return slices(process, _MODULES, times.start_ns[calls.first_op_id], times.end_ns[calls.last_op_id], heads, more)


def _recomputes(is_recompute: Bools) -> Any:
    return chosen(["", ',"is_recompute":true'], is_recompute.astype(np.int8))


def _module_names(modules: Modules) -> dict[int, str]:
    pairs = zip(modules.module_id.tolist(), modules.name, modules.type, strict=True)
    return {module: str(name or kind) for module, name, kind in pairs}


def _operators(
    trace: Trace, process: int, modules: Modules, sources: Sources, history: History, times: Times
) -> Iterator[Events]:
    columns = trace.columns(Ops, "name", "duration_us", "flops", "is_recompute", "stack_id", "micro_batch")
    names: Coded = columns["name"]
    name_texts = as_texts([quoted(str(name)) for name in names.distinct])
    phase_texts = as_texts(list(map(quoted, history.phases)))
    of_modules = (f',"module":{quoted(name)}' for name in _module_names(modules).values())
    of_stacks = (f',"source":{quoted(frames[0].place)}' if frames else "" for frames in sources.user_frames)
    module_texts, source_texts = as_texts(["", *of_modules]), as_texts(["", *of_stacks])  # NONE, -1, is the first
    for low in range(0, history.ops, CHUNK):
        rows = slice(low, low + CHUNK)
        name, phase = chosen(name_texts, names.codes[rows]), chosen(phase_texts, history.phase[rows])
        more = (
            '"op_id":',
            np.arange(low, low + len(name)),
            ',"step":',
            history.step[rows],
            ',"micro_batch":',
            columns["micro_batch"][rows],
            chosen(module_texts, history.module[rows] + 1),
            chosen(source_texts, columns["stack_id"][rows] + 1),
            formatted(columns["duration_us"][rows], lambda us: f',"duration_us":{us:.3f}' if math.isfinite(us) else ""),
            formatted(columns["flops"][rows], lambda flops: f',"flops":{flops}' if flops else ""),
            _recomputes(columns["is_recompute"][rows]),
        )
        start_ns, end_ns = times.start_ns[rows], times.end_ns[rows]
        yield from slices(process, _OPERATORS, start_ns, end_ns, ('"name":', name, ',"cat":', phase), more)


def _lives(
    trace: Trace,
    process: int,
    modules: Modules,
    sources: Sources,
    history: History,
    times: Times,
    lives: int,
) -> Iterator[Events]:
    """Writes the lifetimes of what is live at the peak; what outlives the recording ends with it."""
    if not history.ops or not lives:
        return
    alive = history.alive(history.peak())
    largest = alive[np.argsort(-history.size[alive], kind="stable")[:lives]]
    rows = np.sort(largest[history.size[largest] > 0])
    texts = trace.columns(Storages, "name", "shape", "dtype")
    ops = trace.columns(Ops, "name", "stack_id")
    names = _module_names(modules)
    for row in rows.tolist():
        made, freed, owner = int(history.created[row]), int(history.freed[row]), int(history.owner[row])
        source = None if made == NONE else sources.of_stack(int(ops["stack_id"][made]))
        about: dict[str, Any] = {
            "bytes": int(history.size[row]),
            "storage_id": row,
            "name": texts["name"][row],
            "module": names.get(owner, ""),
            "shape": texts["shape"][row],
            "dtype": texts["dtype"][row],
            "made_by": "" if made == NONE else ops["name"][made],
            "source": "" if source is None else source.place,
        }
        start_ns, end_ns = int(times.start_ns[max(made, 0)]), int(times.end_ns[freed])  # NONE (-1) is the last
        category = history.storage_categories[history.category[row]]
        yield life(process, row, category, start_ns, end_ns, {k: v for k, v in about.items() if v})
