"""Runs the updates of one optimizer, for all parameters or one, with unchanged, 8-bit or host state."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.optimizer.used import StepSettings
from memprof.policies.runtime.job import PerOptimizer
from memprof.recorder.steps.update_hooks import inner_steps

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job

_EIGHT_BIT = (
    ("torchao.optim", {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}),
    (
        "bitsandbytes.optim",
        {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit", torch.optim.SGD: "SGD8bit"},
    ),
)


class Updates:
    """The updates of one optimizer, run through its own step, state and parameter groups.

    Attributes:
        optimizer: The optimizer.
        lock: Held while a parameter is updated.
        before: Called with the optimizer before a parameter is updated alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.before: Callable[[torch.optim.Optimizer], None] | None = None
        self._stepping = optimizer
        self._step = unhooked_step(optimizer)  # now, because the optimizer's own step may be replaced later
        self.lock = threading.RLock()  # backward runs one thread per device
        self._settings = StepSettings()

    def prepare(self, job: Job) -> None:
        """Replaces the optimizer's step where necessary."""

    def all_of(self) -> None:
        """Updates every parameter that has a gradient."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in list(group["params"]):
                if parameter.grad is not None:
                    self.single(number, parameter)
        self.end_round()

    def single(self, number: int, parameter: torch.Tensor) -> None:
        """Updates one parameter of the group with the given index.

        What this changes in the settings takes effect in ``end_round``: one step counts once. The step of a subclass
        may call another that has hooks; the optimizer's own do not run there.
        """
        optimizer = self._stepping
        with self.lock:
            groups = optimizer.param_groups
            group = groups[number]
            with self._settings.unchanged(group), self._settings.unchanged(vars(optimizer)):
                group["params"], optimizer.param_groups = [parameter], [group]
                optimizer._optimizer_step_pre_hooks = OrderedDict()
                optimizer._optimizer_step_post_hooks = OrderedDict()
                if self.before is not None:
                    self.before(optimizer)
                try:
                    with inner_steps(optimizer):
                        self._step(optimizer)
                finally:
                    optimizer.param_groups = groups  # a property in some optimizers outside torch

    def end_round(self) -> None:
        """Gives the settings the values that one step has left, after all of its parameters."""
        with self.lock:
            self._settings.end_round()


class HostUpdates(Updates):
    """Keeps state in host memory, and copies that of one parameter at a time to the device.

    On a device all copies run on the updating stream, so they need no individual synchronisation: a state is copied in
    only after its copy out. All of them are synchronised before the host copies are read.
    """

    def prepare(self, job: Job) -> None:
        """Moves existing state to the host, and updates one parameter at a time from now on."""
        for parameter in list(self.optimizer.state):
            self._send(parameter)
        job.on_undo(self._bring_all)
        replace_step(job, self.optimizer, self.all_of)
        job.on_undo(self.optimizer.register_state_dict_pre_hook(self._wait).remove)

    def all_of(self) -> None:
        """Updates every parameter that has a gradient, and waits until all state is in host memory."""
        super().all_of()
        self._wait()

    def single(self, number: int, parameter: torch.Tensor) -> None:
        """Copies a parameter's state to the device, updates it, and copies its state out."""
        with self.lock:
            homes = self._bring(parameter)
            try:
                super().single(number, parameter)
            finally:
                self._send(parameter, homes)

    def _bring(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies state to the parameter's device; returns the host tensors it came from."""
        state = self.optimizer.state.get(parameter, {})
        homes = {key: value for key, value in state.items() if _is_away(value, parameter)}
        for key, home in homes.items():
            state[key] = home.to(parameter.device, non_blocking=True)
        return homes

    def _send(self, parameter: torch.Tensor, homes: dict[str, torch.Tensor] | None = None) -> None:
        for key, value in self.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu" or value.dim() == 0:
                continue
            home = (homes or {}).get(key)
            if home is None or home.shape != value.shape or home.dtype != value.dtype:
                home = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
            self.optimizer.state[parameter][key] = home.copy_(value, non_blocking=home.is_pinned())

    def _wait(self, *_: Any) -> None:
        for device in {p.device for group in self.optimizer.param_groups for p in group["params"]}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _bring_all(self) -> None:
        for parameter in list(self.optimizer.state):
            self._bring(parameter)


class EightBitUpdates(Updates):
    """Keeps state in 8 bits, through an optimizer of torchao or bitsandbytes that has the same settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Creates the 8-bit optimizer.

        Raises:
            PolicyError: Neither library is installed or has such an optimizer, or state already exists.
        """
        super().__init__(optimizer)
        kind = _eight_bit_type(optimizer)
        if any(len(state) for state in optimizer.state.values()):
            raise PolicyError("the optimizer already has 32-bit state; apply 8-bit state before the first step.")
        known = inspect.signature(kind).parameters
        groups = [
            {key: value for key, value in group.items() if key in known or key == "params"}
            for group in optimizer.param_groups
        ]
        self._inner: torch.optim.Optimizer = kind(groups, lr=optimizer.param_groups[0]["lr"])
        # Its steps count as the optimizer's own: hooks, including a recorder's, must not count them twice.
        made = type(self._inner)
        self._step = unhooked_step(self._inner)
        self._inner.__class__ = type(made.__name__, (made,), {"step": self._step})
        self._stepping = self._inner

    def prepare(self, job: Job) -> None:
        """Steps through the 8-bit optimizer from now on, and shares its state."""
        before = self.optimizer.state
        self.optimizer.state = self._inner.state
        job.on_undo(lambda: setattr(self.optimizer, "state", before))
        replace_step(job, self.optimizer, self._all_at_once)

    def single(self, number: int, parameter: torch.Tensor) -> None:
        """Updates one parameter."""
        self._take_settings()
        super().single(number, parameter)

    def _all_at_once(self) -> None:
        self._take_settings()
        self._step(self._inner)

    def _take_settings(self) -> None:
        for own, group in zip(self._inner.param_groups, self.optimizer.param_groups, strict=True):
            for key in own.keys() & group.keys() - {"params"}:
                if isinstance(own[key], torch.Tensor) and not isinstance(group[key], torch.Tensor):
                    own[key].fill_(group[key])
                else:
                    own[key] = group[key]


#: The updates in force.
_in_force: PerOptimizer[Updates] = PerOptimizer()


def updates_of(job: Job, optimizer: torch.optim.Optimizer, kind: type[Updates]) -> Updates:
    """Returns an optimizer's updates, prepared; those that the job of another model has made, if any.

    Raises:
        PolicyError: The optimizer does not support them.
    """
    known = _in_force.get(optimizer)
    if known is None:
        known = kind(optimizer)
        known.prepare(job)
        _in_force.keep(job, known)
    return known


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns an optimizer's step without its hooks, which must run once per step, not once per parameter."""
    step = type(optimizer).step
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inner


def replace_step(job: Job, optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
    """Replaces an optimizer's step; keeps its hooks, its schedulers and its type's name."""
    before = type(optimizer)
    own_step = optimizer.__dict__.get("step")

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update()
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]
    optimizer.__class__ = type(before.__name__, (before,), {"step": hooked, "__module__": before.__module__})
    if own_step is not None:  # a scheduler's wrapper, which counts calls and would call the old step

        def counted(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return hooked(optimizer, *args, **kwargs)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.__dict__["step"] = counted

    def restore() -> None:
        optimizer.__class__ = before
        if own_step is not None:
            optimizer.__dict__["step"] = own_step

    job.on_undo(restore)


def _is_away(value: Any, parameter: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dim() > 0
        and parameter.device.type != "cpu"
    )


def _eight_bit_type(optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    is_installed = False
    for library, types in _EIGHT_BIT:
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        is_installed = True
        found = getattr(module, types.get(kind, ""), None)
        if found is not None:
            return found
    if is_installed:
        raise PolicyError(f"{kind.__name__} has no 8-bit form; only Adam and AdamW do.")
    raise PolicyError("8-bit optimizer state needs torchao or bitsandbytes; install one: pip install torchao.")
