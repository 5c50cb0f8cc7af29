"""Memory-relevant behaviour of torch by NVIDIA architecture (``architectures.toml``)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Workspace that cuBLASLt has of its own before torch 2.12, on every architecture (getCUDABlasLtWorkspaceSize,
#: aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.11).
LT_WORKSPACE_BYTES = 1 << 20


@dataclass(frozen=True)
class Architecture:
    """Behaviour of torch on devices of some compute capabilities.

    Attributes:
        name: Its name, such as ``Hopper``.
        threads: Maximum number of threads on a multiprocessor.
        cublas_workspace_bytes: Workspace torch allocates per cuBLAS handle.
        older_workspace_bytes: The same before torch 2.12.
        attention: Kernels of scaled dot product attention, in order of preference: ``cudnn``, ``flash``, ``efficient``.
        flash_backward_width: Largest head dimension the flash kernel supports in training; 0 without a flash kernel.
        has_bf16_attention: Whether the efficient kernel supports bfloat16.
    """

    name: str
    threads: int
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
            name=row["name"],
            threads=row["threads"],
            older_workspace_bytes=row.get("older_workspace", row["cublas_workspace"]),
            cublas_workspace_bytes=row["cublas_workspace"],
            attention=tuple(row["attention"]),
            flash_backward_width=row["flash_backward"],
            has_bf16_attention=row["bf16"],
        )
        for row in _read()["architecture"]
        for capability in row["capabilities"]
    }


@cache
def _read() -> dict[str, Any]:
    text = Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
