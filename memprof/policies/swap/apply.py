"""Applies the swap policy to a real job: saved tensors, optimizer state and parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.errors import PolicyError
from memprof.policies.plan.patterns import match_modules
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import hook_weakly, is_dry_run, replace_weakly
from memprof.policies.swap.moves import Carrier, Moves
from memprof.policies.swap.packing import NOTHING_TAKEN, SavedTensors, callable_modules, is_plain, require_unhooked
from memprof.policies.swap.predicted_moves import NO_HISTORY
from memprof.policies.swap.regions import MovedParameter, Region
from memprof.policies.swap.transfers import DiskCarrier, HostCarrier, is_in_memory

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap


def apply(job: Job, policy: Swap) -> None:
    """Installs the policy.

    Raises:
        PolicyError: The job does not run on the device that the policy moves from, a pattern matches nothing, or the
            folder is not writable.
    """
    device = job.device
    if policy.to == "host" and device.type != "cuda":
        raise PolicyError("swap cannot move to host: this model is already in host memory; write to = 'disk'.")
    if policy.to == "disk" and device.type != "cpu":
        raise PolicyError(
            f"swap can only move to disk from host memory, and this model is on {device.type}; write to = 'host'."
        )
    if policy.what != "activations" and job.has_parts:
        raise PolicyError(
            f"parameters are sharded over ranks, so swap cannot move {policy.what}; swap activations, or use shard "
            "stage 0 or 1."
        )
    names = match_modules(policy.modules, job.modules_named())
    if policy.what != "activations":
        job.require_optimizer(f"swap of {'optimizer state' if policy.what == 'optimizer' else policy.what}")
    if policy.what == "optimizer" and any(isinstance(each, torch.optim.LBFGS) for each in job.optimizers):
        raise PolicyError(NO_HISTORY)
    carrier = _carrier(job, policy)
    job.on_undo(carrier.close)
    if policy.what == "optimizer":
        from memprof.policies.swap.states import swap_states

        modules = job.modules_named()
        chosen = None if policy.is_whole else frozenset(p for name in names for p in modules[name].parameters())
        swap_states(job, carrier, policy.minimum_bytes, chosen, one_by_one=policy.one_by_one)
    elif policy.what == "parameters":
        swap_parameters(job, names, carrier, policy.minimum_bytes)
    else:
        moves = Moves(carrier, policy.minimum_bytes, policy.prefetch)
        SavedTensors(job.model, moves, job.expect(policy.describe(), NOTHING_TAKEN)).install(job, names)


def _carrier(job: Job, policy: Swap) -> DiskCarrier | DryCarrier | HostCarrier:
    if is_dry_run():
        return DryCarrier(job.device)
    if policy.to == "host":
        return HostCarrier(job.device)
    folder = policy.folder or tempfile.gettempdir()
    if is_in_memory(folder):
        job.notes.append(f"swap writes to {folder}, which is itself in memory: set folder to one on a disk.")
    try:
        return DiskCarrier(folder)
    except OSError as error:
        raise PolicyError(f"swap cannot write to {folder}: {error.strerror}; set folder to a writable one.") from error


class DryCarrier:
    """Allocates memory where the other carriers do, for tensors that have none; every copy completes at once.

    Attributes:
        device: The device it moves from, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = str(device)

    def send(self, storage: torch.UntypedStorage) -> int:
        """Returns the bytes moved out."""
        return storage.nbytes()

    def sent(self, place: int) -> bool:
        """Always true: copies never fail here."""
        return True

    def fetch(self, place: int) -> torch.UntypedStorage:
        """Allocates a storage of the same size."""
        return torch.empty(place, dtype=torch.uint8, device=self.device).untyped_storage()

    def fetched(self, place: int) -> None:
        """Does nothing: there is nothing to wait for."""

    def forget(self, place: int, storage: torch.UntypedStorage | None) -> None:
        """Does nothing: nothing is stored."""

    def close(self) -> None:
        """Does nothing: no copy is in progress."""


def swap_parameters(job: Job, names: Iterable[str], carrier: Carrier, minimum_bytes: int) -> None:
    """Wraps the chosen modules, and hooks the optimizers.

    Raises:
        PolicyError: No parameter can be moved.
    """
    chosen = callable_modules(job, names)
    require_unhooked(job.model, chosen)
    owned = _movable(job, chosen, carrier, max(minimum_bytes, 1))
    if not owned:
        raise PolicyError(
            f"no unshared parameter of the chosen modules has {minimum_bytes:,} bytes or more; choose other modules "
            "or a smaller minimum_bytes."
        )
    parameters = {id(parameter): MovedParameter(parameter, carrier) for parameter in owned}
    for module in chosen:
        region = Region(parameters[id(p)] for p in module.parameters() if id(p) in parameters)
        if region:
            job.wrap_forward(module, region.wrap)
    for module in {id(each): each for top in chosen for each in top.modules()}.values():
        region = Region(parameters[id(p)] for p in module.parameters() if id(p) in parameters)
        if region and type(module).forward is not torch.nn.Module.forward:
            job.wrap_forward(module, region.wrap_inside, innermost=True)
    everything = Region(parameters.values())
    updates = _Updates(parameters)
    # Hooks on all optimizers, because the job may create another one later.
    job.on_undo(hook_weakly(register_optimizer_step_pre_hook, updates.before_step))
    job.on_undo(hook_weakly(register_optimizer_step_post_hook, updates.after_step))
    job.put_around_updates(None, updates.around)
    job.put_around_uses(updates.around_uses)
    job.on_undo(replace_weakly(parametrize, "register_parametrization", updates.parametrize))
    job.on_undo(everything.bring_in)


class _Updates:
    """Parameters that are brought in while an optimizer updates them, and for uses outside their modules."""

    def __init__(self, parameters: dict[int, MovedParameter]) -> None:
        self._parameters = parameters
        self._pinned = Region([])
        self._one_by_one = False

    @contextmanager
    def around(self, parameter: torch.Tensor) -> Iterator[None]:
        """Brings one parameter in; after the first call, a step brings in only those that still have a gradient."""
        self._one_by_one = True
        own = self._parameters.get(id(parameter))
        region = Region([] if own is None else [own])
        region.pin()
        try:
            yield
        finally:
            region.let_go()

    def around_uses(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Brings parameters in for a use outside their modules' forward."""
        used = [own for each in tensors if (own := self._parameters.get(id(each))) is not None]
        return Region(used).in_use() if used else nullcontext()

    def parametrize(self, before: Any, module: torch.nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        """Brings in a parameter that is parametrized: its values go into new parameters."""
        own = self._parameters.get(id(module._parameters.get(tensor_name)))
        if own is not None:
            own.bring_in()
        return before(module, tensor_name, *args, **kwargs)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Brings in the parameters for an update of all."""
        self._pinned.unpin()  # left by an update that ended with an exception
        self._pinned = Region([])
        given = [p for group in optimizer.param_groups for p in group["params"]]
        needed = {id(p): p for p in given if id(p) in self._parameters and (not self._one_by_one or is_plain(p.grad))}
        self._pinned = Region([self._parameters[key] for key in needed])
        self._pinned.pin()

    def after_step(self, *_: Any) -> None:
        """Releases them."""
        pinned, self._pinned = self._pinned, Region([])
        pinned.let_go()


def _movable(job: Job, chosen: list[torch.nn.Module], carrier: Carrier, minimum_bytes: int) -> list[torch.nn.Parameter]:
    """Returns parameters of the chosen modules that no other module shares and that have a storage of their own."""
    inside = {id(module) for top in chosen for module in top.modules()}
    others = (module for module in job.model.modules() if id(module) not in inside)
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}
    found = {id(p): p for top in chosen for p in top.parameters()}
    return [
        p
        for key, p in found.items()
        if key not in shared
        and is_plain(p)
        and str(p.device) == carrier.device
        and p.nbytes >= minimum_bytes
        and p.untyped_storage().nbytes() == p.nbytes
    ]
