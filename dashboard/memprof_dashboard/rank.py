"""One process of a recording, with the data of the views, each part read on first use."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree, folded_tree
from memprof.analysis.report.moments import is_end_state_only
from memprof.analysis.report.sources import Sources, find_sources
from memprof.replay.history import History
from memprof.trace.files.coded import Coded
from memprof.trace.schema import NONE, Floats, Modules, Ops, Stacks, Steps, Storages, Table
from memprof.trace.step import Step
from memprof.trace.store import Trace

if TYPE_CHECKING:
    from memprof.analysis.allocator.device_verdict import DeviceVerdict
    from memprof.analysis.leaks.leaks import LeakReport


class Rank:
    """One process of a recording, with the data of the views, each part read on first use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._lock = threading.RLock()
        self._steps: dict[int, Step] = {}
        self._history: History | None = None
        self._verdicts: dict[int | None, DeviceVerdict] = {}

    @property
    def history(self) -> History:
        """Live bytes during every operator; computed once, also under concurrent access."""
        with self._lock:
            if self._history is None:
                self._history = History(self.trace)
            return self._history

    @cached_property
    def modules(self) -> Modules:
        """The job's modules."""
        return self.trace.table(Modules)

    @cached_property
    def tree(self) -> ModuleTree:
        """The job's modules, repeated layers folded."""
        return folded_tree(self.modules)

    @cached_property
    def steps(self) -> Steps:
        """The job's steps."""
        return self.trace.table(Steps)

    @cached_property
    def op_names(self) -> Coded:
        """Name of each operator."""
        return self._texts(Ops, "name")

    @cached_property
    def op_stacks(self) -> np.ndarray:
        """Stack of each operator, NONE where none was captured."""
        stacks: np.ndarray = self.trace.columns(Ops, "stack_id")["stack_id"].astype(np.int32)
        return stacks

    @cached_property
    def clock(self) -> Floats | None:
        """When each operator begins in ms, without the recorder, and the end: ``(ops + 1,)``; None where unknown."""
        lengths = np.nan_to_num(self.trace.columns(Ops, "duration_us")["duration_us"] / 1e3)
        times: Floats = np.concatenate(([0.0], np.cumsum(lengths)))
        return times if times[-1] > 0 else None

    @cached_property
    def storage_texts(self) -> dict[str, Coded]:
        """Name, shape, dtype and device of each storage."""
        return {name: self._texts(Storages, name) for name in ("name", "shape", "dtype", "device")}

    @cached_property
    def stacks(self) -> Stacks:
        """The job's Python stacks."""
        return self.trace.table(Stacks)

    @cached_property
    def sources(self) -> Sources:
        """The lines of user code in each stack."""
        return find_sources(self.stacks)

    @cached_property
    def is_end_state(self) -> bool:
        """Whether only what is in use at the end is known, without a history."""
        return is_end_state_only(self.trace)

    @cached_property
    def has_modules(self) -> bool:
        """Whether memory is known to belong to modules."""
        return bool((self.history.owner != NONE).any())

    @cached_property
    def has_stacks(self) -> bool:
        """Whether the code that allocated memory is known."""
        return bool((self.op_stacks != NONE).any())

    @cached_property
    def has_phases(self) -> bool:
        """Whether phases or several steps are known."""
        history = self.history
        has_steps = bool(history.ops) and bool(history.step[0] != history.step[-1])
        return has_steps or not set(history.phases) <= {"", "other"}

    def verdict(self, budget_bytes: int | None = None) -> DeviceVerdict:
        """Returns whether it fits a budget, or its device; the last few answers are cached.

        Raises:
            BadInputError: The recording is damaged.
        """
        from memprof.analysis.allocator.device_verdict import judge_device

        with self._lock:
            if budget_bytes not in self._verdicts:
                self._verdicts = dict(list(self._verdicts.items())[-7:])
                self._verdicts[budget_bytes] = judge_device(self.trace, budget_bytes)
            return self._verdicts[budget_bytes]

    @cached_property
    def leaks(self) -> LeakReport:
        """Whether memory grows from step to step, and what makes it grow."""
        from memprof.analysis.leaks.leaks import find_leaks

        return find_leaks(self.trace)

    def step_peaks(self) -> dict[int, int]:
        """Returns the peak of each recorded step, in order."""
        numbers = self.steps.step[(self.steps.kind == "recorded") & (self.steps.first_op_id != NONE)].tolist()
        return {number: self._highest(number) for number in numbers}

    def step(self, number: int) -> Step:
        """Returns a step; the last few are cached."""
        with self._lock:
            if number not in self._steps:
                self._steps = dict(list(self._steps.items())[-3:])
                self._steps[number] = self.trace.step(number)
            return self._steps[number]

    def step_range(self, number: int) -> tuple[int, int]:
        """Returns a step's operators as [first, end); all operators where the step has none."""
        rows = np.flatnonzero((self.steps.step == number) & (self.steps.first_op_id != NONE))
        if not len(rows):
            return 0, self.history.ops
        return int(self.steps.first_op_id[rows[0]]), int(self.steps.last_op_id[rows[0]]) + 1

    def fullest_number(self) -> int:
        """Returns the step shown first: the complete step with the highest peak, else the best match; -1 for none."""
        return self._fullest

    @cached_property
    def _fullest(self) -> int:
        steps = self.steps
        has_ops = (steps.first_op_id != NONE) & (steps.last_op_id != NONE)
        for is_chosen in (
            has_ops & (steps.kind == "recorded") & steps.is_complete,
            has_ops & steps.is_complete,
            has_ops,
        ):
            if is_chosen.any():
                numbers = steps.step[is_chosen].tolist()
                return int(max(numbers, key=lambda number: (self._highest(number), number)))
        return -1

    def _highest(self, number: int) -> int:
        first, end = self.step_range(number)
        return int(self.history.total[first:end].max(initial=0))

    def module_title(self, module_id: int) -> str:
        """Returns a module's qualified name, the type of a root without one, "" outside of any."""
        if module_id == NONE:
            return ""
        return str(self.modules.name[module_id]) or str(self.modules.type[module_id])

    def _texts(self, kind: type[Table], name: str) -> Coded:
        """Reads a column of texts; its codes are as narrow as their number allows."""
        texts: Coded = self.trace.columns(kind, name)[name]
        return texts.narrow()
