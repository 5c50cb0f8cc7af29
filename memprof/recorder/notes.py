"""Sentences for the reader of a recording about what it lacks, each written once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.interfaces import DryRun
from memprof.recorder.log import TOO_MANY_NAMES, RawLog
from memprof.recorder.memory.tensor_memory import gradient_of, modules_of, parameters_of
from memprof.recorder.profiler.sessions import why_no_session
from memprof.recorder.steps.batches import BatchObserver
from memprof.recorder.steps.usages import Usages
from memprof.units import format_bytes, format_count

#: Share of the bytes of trained parameters from which on those without a gradient are noted.
_LEAST_UNTRAINED = 0.1


class Noting(Protocol):
    """A part of the recorder that has notes."""

    def notes(self) -> list[str]:
        """Returns its notes on the recording."""


class Unused:
    """Notes what a job has set up and its recorded updates do not use: trained parameters and checkpointing."""

    def __init__(self, registry: ModuleRegistry, usages: Usages) -> None:
        """Starts before the first update.

        Args:
            registry: The job's models.
            usages: Are told of the modules with idle checkpointing.
        """
        self._registry = registry
        self._usages = usages
        self._trained: dict[int, int] = {}  # bytes by address
        self._without: dict[int, int] = {}
        self._stray: dict[int, int] = {}  # with a gradient, of no optimizer that updates
        self._has_looked = False

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the gradients that an update is about to use."""
        groups = getattr(optimizer, "param_groups", ())
        for parameter in (one for group in groups for one in group["params"] if one.is_leaf and one.requires_grad):
            size = parameter.numel() * parameter.element_size()
            (self._without if parameter.grad is None else self._trained)[id(parameter)] = size
        for one in (own for root in self._registry.roots() for own in parameters_of(root)):
            if (gradient := gradient_of(one)) is not None:
                self._stray[id(one)] = gradient.numel() * gradient.element_size()
        if not self._has_looked:
            self._has_looked = True
            roots = self._registry.roots()
            trained = [
                one
                for one in roots
                if any(id(own) in self._trained or gradient_of(own) is not None for own in parameters_of(one))
            ]
            self._usages.find_idle_checkpoints(
                self._registry.find(part)
                for model in trained
                for part in modules_of(model)
                if vars(part).get("gradient_checkpointing") is True and not part.training
            )

    def notes(self) -> list[str]:
        """Returns what was not used."""
        found = []
        without = [size for address, size in self._without.items() if address not in self._trained]
        if self._trained and sum(without) > _LEAST_UNTRAINED * sum(self._trained.values()):
            found.append(
                f"{format_count(len(without), 'parameter')} of an optimizer ({format_bytes(sum(without))}) got no "
                "gradient in any recorded step. If their blocks are checkpointed with use_reentrant=True and inputs "
                "that require no gradient, pass use_reentrant=False, or call model.enable_input_require_grads()"
            )
        stray = [size for address, size in self._stray.items() if address not in self._trained]
        if self._trained and sum(stray) > _LEAST_UNTRAINED * sum(self._trained.values()):
            found.append(
                f"gradients of {format_count(len(stray), 'parameter')} ({format_bytes(sum(stray))}) are computed, and "
                "no recorded update uses them. If their model is not trained, as a teacher, call it under "
                "torch.no_grad(), or requires_grad_(False) if gradients pass through it"
            )
        return found


class Notes:
    """Writes the notes of one recording."""

    def __init__(self, log: RawLog, batches: BatchObserver, parts: Iterable[Noting], dry: DryRun | None = None) -> None:
        """Starts without any."""
        self._dry = dry
        self._log = log
        self._batches = batches
        self._parts = parts
        self._noted: set[str] = set()

    def add(self, sentence: str) -> None:
        """Writes a note, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._log.record("notes", sentence)

    def untimed(self) -> None:
        """Notes that the timed step was not timed."""
        self.add(f"{why_no_session()} in the timed step: operator times are estimates")

    def finish(self, not_followed: Iterable[str]) -> None:
        """Writes what the whole window has shown.

        Args:
            not_followed: Higher-order operators of which the operators inside were not recorded.
        """
        if self._batches.undivided:
            self._log.record("batches", self._batches.undivided)
        needs = [*self._batches.loaders.needs(), *(() if self._dry is None else self._dry.needs())]
        self._log.record("needs", needs)
        for part in self._parts:
            for sentence in part.notes():
                self.add(sentence)
        for name in sorted(not_followed):
            self.add(f"{name}: this higher-order operator is recorded as one operator, without the operators inside")
        if self._log.names_left_out:
            self.add(TOO_MANY_NAMES)
