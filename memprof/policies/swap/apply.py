"""Applies the swap policy to a real job: saved tensors, optimizer state or parameters."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import torch

from memprof.errors import PolicyError
from memprof.policies.plan.patterns import match_modules
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import is_dry_run
from memprof.policies.swap.moves import Moves
from memprof.policies.swap.packing import NOTHING_TAKEN, SavedTensors
from memprof.policies.swap.predicted_moves import NO_HISTORY
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
            f"Parameters are sharded over ranks, so swap cannot move {policy.what}; swap activations, or use shard "
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
        from memprof.policies.swap.parameters import swap_parameters

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
        """Stores the device."""
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
