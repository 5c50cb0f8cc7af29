"""What every open recording shares: the observed thread and its end, the log, and remarks for the reader.

A remark may be added before or after a recording begins; each recording of the process writes all of them.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.log import RawLog
from memprof.recorder.memory.failures import FailureLog
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.steps.progress import TrainedModels
from memprof.recorder.steps.rounds import OptimizerRounds


class ThreadObservation(ABC):
    """Observes and logs the steps of one thread: the one that created it.

    Attributes:
        thread: The thread observed.
    """

    def __init__(self, log: RawLog, start: dict[str, Any], folder: Path, rounds: OptimizerRounds) -> None:
        """Begins the log.

        Args:
            log: The raw log.
            start: Its first record, which describes the process.
            folder: Folder of the log, for what is written when no memory is left.
            rounds: The job's optimizers.

        Raises:
            OSError: The log cannot be written.
        """
        self.thread = threading.get_ident()
        self._rounds = rounds
        self._trained = TrainedModels(rounds)
        self._log = log
        log.record("start", start)
        self._remarks = RemarkReader()
        self._registry = ModuleRegistry(log)
        self._inventory = Inventory(log, self._registry, rounds)
        self._failures = FailureLog(folder, log, self._registry, rounds)
        self._step_start_ns = 0
        self._stated_holders = 0

    def is_mine(self) -> bool:
        """Whether this is the observed thread."""
        return threading.get_ident() == self.thread

    def give_up(self, fault: str) -> None:
        """Ends a recording that failed; sessions started inside backward wait for `abandon`."""
        self.abandon()
        self._log.abort(fault)

    @abstractmethod
    def abandon(self) -> None:
        """Ends the sessions still open on this thread, without logging: the recording failed, or this is a fork."""

    @abstractmethod
    def close_call(self, call: Any, error: BaseException | None) -> None:
        """Records the end of a module call, and of nested calls whose end was not reported.

        Args:
            call: What the call's begin returned.
            error: The error that it ends with, None if it returns.
        """

    @abstractmethod
    def end_update(self) -> None:
        """Records that an optimizer has updated."""

    def note(self, sentence: str) -> None:
        """Writes a note for the reader of the trace."""
        self._log.record("notes", sentence)

    def _write_remarks(self) -> None:
        for remark in self._remarks.fresh():
            self._log.record(*remark)

    def _state_models(self) -> None:
        self._stated_holders = self._registry.holders
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.models()
            resized = self._registry.resized()
        if resized:
            self._log.record("module_bytes", resized)

    def _state_new_models(self) -> None:
        """States the models again if one was created or changed within the step."""
        if self._registry.holders != self._stated_holders:
            self._state_models()

    def _state_optimizers(self) -> None:
        with torch._C.DisableTorchFunction(), untraced():
            for optimizer in self._rounds.alive():
                self._inventory.optimizer_state(optimizer)

    def state_leaves(self) -> None:
        """States what a job without models trains, and its gradients."""
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.leaves()

    def _state_gradients(self, optimizer: Any) -> None:
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.gradients(optimizer)


class ThreadEnd:
    """Calls back when the thread that created it ends."""

    def __init__(self, action: Callable[[], None]) -> None:
        """Waits for the current thread to end.

        Args:
            action: Called in that thread; it must not raise.
        """
        self._of_thread = threading.local()
        self._of_thread.end = _Last(action)


class _Last:
    """Thread-local object, freed with its thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()


@dataclass(frozen=True, eq=False)
class Remark:
    """One remark.

    Attributes:
        stream: Stream of records it goes to.
        record: Its content, as JSON.
        about: Object it refers to; once that is freed, the remark is no longer written.
    """

    stream: str
    record: Any
    about: weakref.ref[Any]


#: In the order added.
_remarks: list[Remark] = []


def add_remark(stream: str, record: Any, about: Any) -> Remark:
    """Adds a remark.

    Args:
        stream: ``notes`` for a sentence, ``plan`` for the plan in force, as a JSON-serializable dict.
        record: The remark.
        about: The model it refers to: recordings include the remark while the model is alive.
    """
    remark = Remark(stream, record, weakref.ref(about))
    _remarks.append(remark)
    return remark


def remove_remark(remark: Remark) -> None:
    """Removes a remark: later recordings do not include it."""
    if remark in _remarks:
        _remarks.remove(remark)


class RemarkReader:
    """Returns each remark once; every recording has its own reader."""

    def __init__(self) -> None:
        self._written: list[Remark] = []
        self._sentences: list[Any] = []

    def fresh(self) -> list[tuple[str, Any]]:
        """Returns stream and record of the remarks not returned before."""
        fresh = [remark for remark in _remarks if remark not in self._written and remark.about() is not None]
        self._written += fresh
        said = []
        for remark in fresh:
            # The same note about a model and its copies is written once.
            if remark.stream != "notes" or remark.record not in self._sentences:
                said.append((remark.stream, remark.record))
            if remark.stream == "notes":
                self._sentences.append(remark.record)
        return said
