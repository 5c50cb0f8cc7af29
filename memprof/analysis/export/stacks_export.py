"""Exports the live memory of one moment as flame graphs: by allocating code, and by owning module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.analysis.report.breakdown import WORKSPACE, Holding, hold_at
from memprof.analysis.report.sources import find_sources
from memprof.errors import UsageError
from memprof.replay.live import peak_op
from memprof.trace.exporters.trace_events import whole_text
from memprof.trace.schema import NONE, Modules
from memprof.trace.store import Trace
from memprof.version import __version__

# Writes profiles of bytes by stack for speedscope.app.
#
# Source: speedscope's file format, ``https://www.speedscope.app/file-format-schema.json``: sampled profiles, whose
# samples are stacks of frames, outermost first, each with a weight.

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True, order=True)
class Frame:
    """One frame of a stack.

    Attributes:
        name: Display name.
        file: Source file, "" where there is none.
        line: Line number, 0 where unknown.
    """

    name: str
    file: str = ""
    line: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the frame as a speedscope JSON object."""
        place = {"file": whole_text(self.file)} if self.file else {}
        return {"name": whole_text(self.name), **place, **({"line": self.line} if self.line else {})}


#: Bytes by stack, outermost frame first.
Profile = Mapping[tuple[Frame, ...], int]


def speedscope_bytes(title: str, profiles: Mapping[str, Profile], made_by: str) -> bytes:
    """Writes named profiles of bytes; the first one is shown first."""
    frames: dict[Frame, int] = {}
    written = [_profile(name, profile, frames) for name, profile in profiles.items()]
    content = {
        "$schema": SCHEMA,
        "name": whole_text(title),
        "exporter": made_by,
        "activeProfileIndex": 0,
        "shared": {"frames": [frame.to_json() for frame in frames]},
        "profiles": written,
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _profile(name: str, profile: Profile, frames: dict[Frame, int]) -> dict[str, Any]:
    stacks: Sequence[tuple[Frame, ...]] = sorted(profile)  # equal prefixes are adjacent
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(profile.values()),
        "samples": [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks],
        "weights": [profile[stack] for stack in stacks],
    }


_BEFORE, _NO_STACK, _NO_MODULE = (
    Frame("allocated before the step"),
    Frame("without a stack"),
    Frame("outside any module"),
)


@dataclass(frozen=True)
class ExportedStacks:
    """The flame graphs of a moment, as a file.

    Attributes:
        content: The file for speedscope.
        moment: The moment, ``step 4, operator 812``.
        total_bytes: Live bytes at that moment: the sum of each graph.
    """

    content: bytes
    moment: str
    total_bytes: int


def export_stacks(trace: Trace, step_number: int | None = None, op_id: int | None = None) -> ExportedStacks:
    """Writes the live memory of a moment as two speedscope profiles, each summing to the allocated bytes.

    ``by code``: the user's frames that allocated it, outermost first, then the operator, then the category; for memory
    allocated before the step, category and name instead. ``by module``: the path of the module that owns or allocated
    it, then the category.

    Args:
        trace: The recording, at the rank to export.
        step_number: The step; the fullest one where left out.
        op_id: The operator, counted from 0 in the step; that of the peak where left out.

    Raises:
        BadInputError: The recording contains no operators, or is damaged.
        UsageError: There is no such step or operator.
    """
    step = trace.fullest_step() if step_number is None else trace.step(step_number)
    if op_id is not None and not 0 <= op_id < len(step.ops):
        raise UsageError(f"step {step.number} has no operator {op_id}; it has operators 0 to {len(step.ops) - 1}.")
    peak = peak_op(step)
    at = peak if op_id is None else op_id
    holding = hold_at(step, at)
    moment = f"step {step.number}, operator {at}"
    where = f"{moment}{' (the peak)' if at == peak else ''}"
    profiles = {f"by code: {where}": _by_code(holding), f"by module: {where}": _by_module(holding)}
    rank = f", rank {trace.rank}" if len(trace.ranks) > 1 else ""
    title = f"{trace.manifest.target or trace.path.name}{rank}: live bytes at {where}"
    return ExportedStacks(speedscope_bytes(title, profiles, f"memprof {__version__}"), moment, holding.total_bytes)


def _by_code(holding: Holding) -> Profile:
    step = holding.step
    sources = find_sources(step.stacks)
    frames_of: dict[int, tuple[Frame, ...]] = {NONE: (_NO_STACK,)}

    def code_of(op: int) -> tuple[Frame, ...]:
        """Returns the frames that called an operator, and the operator."""
        stack = int(step.ops.stack_id[op])
        if stack not in frames_of:
            lines = sources.user_frames[stack]
            frames_of[stack] = tuple(Frame(one.function or one.place, one.file, one.line) for one in reversed(lines))
        return (*frames_of[stack], Frame(str(step.ops.name[op])))

    storages = step.storages
    found: Counter[tuple[Frame, ...]] = Counter()
    for row, op, size in zip(holding.rows.tolist(), holding.makers.tolist(), holding.bytes.tolist(), strict=True):
        category = Frame(str(storages.category[row]))
        if op == NONE:
            name = str(storages.name[row])
            found[(_BEFORE, category, Frame(name)) if name else (_BEFORE, category)] += size
        else:
            found[(*code_of(op), category)] += size
    if holding.workspace_bytes:
        found[(*code_of(holding.op_id), Frame(WORKSPACE))] += holding.workspace_bytes
    return found


def _by_module(holding: Holding) -> Profile:
    step = holding.step
    paths = _module_paths(step.modules)
    storages = step.storages
    found: Counter[tuple[Frame, ...]] = Counter()
    for row, size in zip(holding.rows.tolist(), holding.bytes.tolist(), strict=True):
        found[(*paths[int(storages.module_id[row])], Frame(str(storages.category[row])))] += size
    if holding.workspace_bytes:
        found[(*paths[int(step.ops.module_id[holding.op_id])], Frame(WORKSPACE))] += holding.workspace_bytes
    return found


def _module_paths(modules: Modules) -> dict[int, tuple[Frame, ...]]:
    paths: dict[int, tuple[Frame, ...]] = {NONE: (_NO_MODULE,)}
    parents = dict(zip(modules.module_id.tolist(), modules.parent_id.tolist(), strict=True))
    for module in parents:
        chain = [module]
        while parents.get(chain[-1], NONE) not in (NONE, *chain):  # a damaged table may contain a cycle
            chain.append(parents[chain[-1]])
        titles = ((str(modules.name[one]), str(modules.type[one])) for one in reversed(chain))
        paths[module] = tuple(Frame(f"{name} ({kind})" if name else kind) for name, kind in titles)
    return paths
