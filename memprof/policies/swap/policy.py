"""Moves saved tensors, optimizer state or parameters out of the device while they are not needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Candidates, Policy
from memprof.policies.plan.patterns import condensed
from memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memprof.trace.step import Step

#: Numbers of copies at a time that a search tries.
_PREFETCHES = (1, 2, 4)
WHAT = ("activations", "optimizer", "parameters")
TO = ("host", "disk")
_ONE_BY_ONE = "one-by-one"
#: Defaults without a measurement. disk: reading and writing 1 MiB to 16 MiB through the page cache took 0.07 to 0.1 ms
#: per MiB on a virtual machine with two cores. host: pinned memory over PCIe 4.0 x16, one direction at a time.
DEFAULT_GBPS = {"disk": 12.0, "host": 24.0}


@dataclass(frozen=True)
class Swap(Policy):
    """Moves saved tensors, optimizer state or parameters out of the device while they are not needed.

    Attributes:
        modules: Patterns of module names, "." for the whole model: their parameters are moved, or the optimizer state
            of these, or the tensors saved during their forward.
        what: One of WHAT.
        to: host for a CUDA device, disk for a job on the processor.
        minimum_bytes: Smaller storages stay.
        prefetch: Number of storages that may be on their way out, and number brought back ahead of their use; 0 waits
            for every copy.
        gbps: Speed of the copies in 1e9 bytes per second, for the prediction; 0 uses the recording's measurement, or
            DEFAULT_GBPS.
        folder: Folder of the file on disk; "" for the system's temporary folder.
        one_by_one: For optimizer state: ``step()`` updates one parameter at a time, with the state of that one in
            memory, instead of all at once.
    """

    name: ClassVar[str] = "swap"
    flag_words: ClassVar[tuple[str, ...]] = ("optimizer", "optimizer,one-by-one", "parameters", "layers.*")
    tried_by_default: ClassVar[bool] = True
    tried_live: ClassVar[bool] = True
    takes_inputs: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "move tensors that these modules save for backward out of the device and back; optimizer or parameters: move "
        "those instead; optimizer,one-by-one: have the state of one parameter at a time in memory; :disk or :host "
        "selects the destination"
    )
    flag_example: ClassVar[str] = "'layers.[0-3]:disk'"
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "modelled"
    errors_seen: ClassVar[tuple[float, float]] = (0.001, 0.002)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.12, 0.23)

    modules: tuple[str, ...] = (".",)
    what: str = "activations"
    to: str = "host"
    minimum_bytes: int = 1 << 16
    prefetch: int = 1
    gbps: float = 0.0
    folder: str = ""
    one_by_one: bool = False

    def __post_init__(self) -> None:
        """Validates the settings."""
        if not self.modules or not all(self.modules):
            raise PolicyError("swap needs patterns of module names: write modules = ['layers.*'].")
        if self.what not in WHAT:
            raise PolicyError(f"swap: unknown what {self.what!r}; write {', '.join(WHAT[:-1])} or {WHAT[-1]}.")
        if self.to not in TO:
            raise PolicyError(f"swap: unknown to {self.to!r}; write {' or '.join(TO)}.")
        if self.minimum_bytes < 0:
            raise PolicyError(f"swap: invalid minimum_bytes {self.minimum_bytes}; write minimum_bytes = 65536.")
        if self.prefetch < 0:
            raise PolicyError(f"swap: invalid prefetch {self.prefetch}; write prefetch = 1.")
        if not self.gbps >= 0:
            raise PolicyError(f"swap: invalid gbps {self.gbps}; write gbps = {DEFAULT_GBPS[self.to]}, or 0.")
        if self.folder and self.to != "disk":
            raise PolicyError("swap uses a folder only on disk; write to = 'disk' or leave folder out.")
        if not isinstance(self.one_by_one, bool):
            raise PolicyError(f"swap: invalid one_by_one {self.one_by_one!r}; write true or false.")
        if self.one_by_one and self.what != "optimizer":
            raise PolicyError("swap moves only optimizer state one by one; write what = 'optimizer', or leave it out.")

    @property
    def is_whole(self) -> bool:
        """Whether it affects the whole model, and everything else that the optimizers update."""
        return self.modules == (".",)

    @property
    def handles_saved(self) -> bool:
        """Whether activations are moved."""
        return self.what == "activations"

    @property
    def needs_optimizer(self) -> bool:
        """Whether optimizer state is moved."""
        return self.what == "optimizer"

    @property
    def changes_update(self) -> bool:
        """Whether optimizer state or parameters are moved: both must be back for the update."""
        return self.what != "activations"

    @property
    def why_not_torch(self) -> str:
        """Why torch cannot move parameters; "" for activations and optimizer state."""
        return "torch cannot move parameters out between their uses" if self.what == "parameters" else ""

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``layers.*,head``, ``optimizer`` or ``parameters``, optionally followed by ``:disk`` or ``:host``.

        ``optimizer`` may be followed by ``,one-by-one`` and module names, ``parameters`` by module names.

        Raises:
            PolicyError: The text is invalid.
        """
        names, _, to = text.partition(":")
        parts = tuple(part.strip() for part in names.split(",") if part.strip())
        if to.strip() and to.strip() not in TO:
            raise PolicyError(f"swap: unknown suffix {to.strip()!r} after ':'; write --swap {cls.flag_example}.")
        if not parts:
            raise PolicyError(f"swap needs patterns of module names; write --swap {cls.flag_example}.")
        place = to.strip() or "host"
        if parts[0] in WHAT:
            # The whole model at once would bring in all its parameters; so each called module gets its own region.
            everything = ("**",) if parts[0] == "parameters" else (".",)
            chosen = tuple(part for part in parts[1:] if part != _ONE_BY_ONE)
            singly = len(chosen) < len(parts) - 1
            return cls(modules=chosen or everything, what=parts[0], to=place, one_by_one=singly)
        return cls(modules=parts, to=place)

    @property
    def guesses(self) -> bool:
        """Variables may hold moved activations; the owners of optimizer state and parameters are known."""
        return self.what == "activations"

    @property
    def takes_host(self) -> bool:
        """Whether the copies are in host memory, beside a device's."""
        return self.to == "host"

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        """Returns swapping of optimizer state, where there is any: for all updates, and one parameter at a time.

        On a device the optimizer policy keeps the state in host memory for one parameter at a time.
        """
        state = cls(what="optimizer", to="host" if step.targets_device() else "disk")
        if not (step.storages.category == "optimizer_state").any():
            return Candidates(unsuitable={state: "no optimizer keeps any state between steps."})
        return Candidates((state,) if step.targets_device() else (state, replace(state, one_by_one=True)))

    @classmethod
    def module_choices(cls, step: Step, call: range) -> tuple[Callable[[tuple[str, ...]], Policy], ...]:
        """Moves what modules save: to host memory from a device, to disk from host memory."""
        if step.targets_device():
            # Copies of large tensors take longer than the operators between two of them.
            return (lambda modules: cls(modules, to="host", prefetch=4),)
        return (lambda modules: cls(modules, to="disk"),)

    @property
    def variants(self) -> tuple[Policy, ...]:
        """More or fewer copies at a time."""
        if self.what != "activations":
            return ()
        return tuple(replace(self, prefetch=number) for number in _PREFETCHES if number != self.prefetch)

    def narrower(self, step: Step) -> tuple[Policy, ...]:
        """Returns it for the state of one module, from the smallest to the largest, then of several of the largest."""
        if self.what != "optimizer":
            return ()
        from memprof.policies.runtime.model_names import modules_with_state

        own = [name for name in modules_with_state(step, self.minimum_bytes) if self.is_whole or name in self.modules]
        parts = [own[row : row + 1] for row in range(len(own) - 1, -1, -1)] + [own[:row] for row in range(2, len(own))]
        return tuple(replace(self, modules=tuple(sorted(part))) for part in parts) if len(own) > 1 else ()

    def describe(self) -> str:
        """Describes what is moved, and where."""
        chosen = "" if self.is_whole else f" of {condensed(self.modules)}"
        small = (
            "" if self.minimum_bytes == type(self).minimum_bytes else f", from {format_bytes(self.minimum_bytes)} on"
        )
        singly = ", one parameter at a time" if self.one_by_one else ""
        return f"swap {self.what}{chosen} to {self.to}{small}{singly}"
