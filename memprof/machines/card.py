"""The virtual device of a dry run: a machine, and torch's behaviour by architecture (``architectures.toml``)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memprof.errors import UsageError
from memprof.machines.catalogue import CONTEXT_BYTES, Accelerator, find_machine, product_rates

#: Workspace that cuBLASLt has of its own before torch 2.12, on every architecture (getCUDABlasLtWorkspaceSize,
#: aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.11).
LT_WORKSPACE_BYTES = 1 << 20


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
            f"dry runs on {machine.name} are unsupported: only NVIDIA devices of compute capability 7.0 to 12.1 are "
            "modelled. Omit --device, and check the dry run with --budget."
        )
    return Card(machine, architecture)


@dataclass(frozen=True)
class Architecture:
    """Behaviour of torch on devices of some compute capabilities.

    Attributes:
        name: Its name, such as ``Hopper``.
        threads: Maximum number of threads on a multiprocessor.
        blocks: Maximum number of blocks on one.
        shared_bytes: Shared memory of one.
        cublas_workspace_bytes: Workspace torch allocates per cuBLAS handle.
        older_workspace_bytes: The same before torch 2.12.
        attention: Kernels of scaled dot product attention, in order of preference: ``cudnn``, ``flash``, ``efficient``.
        flash_backward_width: Largest head dimension the flash kernel supports in training; 0 without a flash kernel.
        has_bf16_attention: Whether the efficient kernel supports bfloat16.
    """

    name: str
    threads: int
    blocks: int
    shared_bytes: int
    cublas_workspace_bytes: int
    older_workspace_bytes: int
    attention: tuple[str, ...]
    flash_backward_width: int
    has_bf16_attention: bool


def architecture_of(capability: str) -> Architecture | None:
    """Returns the architecture of a compute capability such as ``8.0``; None where unknown."""
    return _by_capability().get(capability)


def data_version() -> int:
    """Returns the version of the data, which recordings of virtual devices store."""
    return int(_read()["version"])


@cache
def cublas_workspace_sizes() -> tuple[int, ...]:
    """Returns the bytes that a handle's workspace may have on a device of unknown architecture, the smallest first."""
    known = _by_capability().values()
    return tuple(sorted({size for one in known for size in (one.cublas_workspace_bytes, one.older_workspace_bytes)}))


@cache
def _by_capability() -> dict[str, Architecture]:
    return {
        capability: Architecture(
            name=name,
            threads=row["multiprocessor"]["threads"],
            blocks=row["multiprocessor"]["blocks"],
            shared_bytes=row["multiprocessor"]["shared_kib"] << 10,
            older_workspace_bytes=row["cublas"].get("older_workspace", row["cublas"]["workspace"]),
            cublas_workspace_bytes=row["cublas"]["workspace"],
            attention=tuple(row["attention"]["kernels"]),
            flash_backward_width=row["attention"]["flash_backward"],
            has_bf16_attention=row["attention"]["bf16"],
        )
        for name, row in _read().items()
        if name != "version"
        for capability in row["capabilities"]
    }


@cache
def _read() -> dict[str, Any]:
    text = Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
