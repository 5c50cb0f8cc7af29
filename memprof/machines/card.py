"""The virtual device of a dry run: a catalogue machine, and torch's behaviour on its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.machines.architectures import Architecture, architecture_of, data_version
from memprof.machines.catalogue import CONTEXT_BYTES, Accelerator, find_machine, product_rates


@dataclass(frozen=True)
class Card:
    """The device presented to the job.

    Attributes:
        machine: Its catalogue entry.
        architecture: torch's behaviour on it.
    """

    machine: Accelerator
    architecture: Architecture

    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability."""
        major, _, minor = self.machine.capability.partition(".")
        return int(major), int(minor)

    @property
    def capacity_bytes(self) -> int:
        """Maximum bytes available to torch."""
        return self.machine.capacity_bytes

    @property
    def context_bytes(self) -> int:
        """Memory the process uses besides tensors: a rule (`machines.catalogue`), not a measurement."""
        return CONTEXT_BYTES

    @property
    def name(self) -> str:
        """Its name as reported by the driver."""
        return f"NVIDIA {self.machine.name}"

    def speed(self) -> dict[str, Any]:
        """Returns its data sheet speeds, in the fields of ``memprof.trace.manifest.Speed``."""
        machine = self.machine
        plain, short = product_rates(machine.flops_per_us)
        return {
            "memory_bytes_per_us": machine.memory_bytes_per_us,
            "to_host_bytes_per_us": machine.host_bytes_per_us,
            "from_host_bytes_per_us": machine.host_bytes_per_us,
            "fp32_flops_per_us": plain,
            "bf16_flops_per_us": short,
            "how": f"data sheet peaks, which jobs do not reach ({machine.source})",
        }

    def note(self) -> str:
        """States that the device is virtual, and by which rules torch was simulated on it."""
        rules = f"torch's rules for {self.architecture.name} (version {data_version()} of memprof's data)"
        return f"the {self.machine.name} is simulated: the job's operators were dispatched by {rules}"

    def describe(self, device: str) -> dict[str, Any]:
        """Returns its manifest entry.

        Args:
            device: Its name in the job, such as ``cuda:0``.
        """
        return {
            "device": device,
            "kind": "cuda",
            "name": self.machine.name,
            "capacity_bytes": self.capacity_bytes,
            "uuid": "",
            "compute": self.machine.capability,
            "driver": "",
            "cuda": "",
            "allocator": "native",
        }


def find_card(name: str) -> Card:
    """Looks up a device for a dry run.

    Args:
        name: Such as ``h100-80g`` or ``RTX 3090``.

    Raises:
        UsageError: Unknown or ambiguous machine, or torch's behaviour on it is unknown.
    """
    machine = find_machine(name)
    architecture = architecture_of(machine.capability)
    if architecture is None:
        raise UsageError(
            f"dry runs on {machine.name} are unsupported: only NVIDIA devices of compute capability 7.0 to 12.0 are "
            "modelled. Omit --device, and check the dry run with --budget."
        )
    return Card(machine, architecture)
