"""What torch does below ``nn.DataParallel`` and NCCL, for the one device of a dry run, and profiles without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from memprof.recorder.dry.device.ordinals import ORDINALS

#: Version of NCCL reported to a job.
_NCCL = (2, 27, 7)


def install() -> None:
    """Puts the functions into ``torch._C``, where a build for the processor has none."""
    written = {
        "_scatter": _scatter,
        "_gather": _gather,
        "_broadcast": _broadcast,
        "_broadcast_coalesced": lambda tensors, devices, *_: [_on(devices, list(tensors))],
        "_nccl_version": lambda: (_NCCL[0] << 32) | (_NCCL[1] << 16) | _NCCL[2],
        "_nccl_version_suffix": lambda: b"",
    }
    for name, function in written.items():
        setattr(torch._C, name, function)
    profiler: Any = torch.autograd.profiler
    profiler.profile.__init__ = _without_events(profiler.profile.__init__)


def _on(devices: Any, tensors: Any) -> Any:
    for device in devices:
        ORDINALS.check(device)
    return tensors


def _scatter(tensor: Any, devices: Any, _sizes: Any = None, dim: int = 0, _streams: Any = None) -> list[Any]:
    return [each.to("cuda") for each in _on(devices, tensor.chunk(len(devices), dim))]


def _gather(tensors: Any, dim: int, _destination: Any = None) -> Any:
    return torch.cat(list(tensors), dim)


def _broadcast(tensor: Any, devices: Any) -> list[Any]:
    return [tensor.to("cuda") for _ in _on(devices, devices)]


def _without_events(begin: Callable[..., None]) -> Callable[..., None]:
    """Returns the beginning of a profile in which no events of CUDA are recorded: torch would print that it cannot."""

    @wraps(begin)
    def without(profile: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "cuda":
            kwargs["use_device"], kwargs["use_cpu"] = None, True
        begin(profile, *args, **kwargs)

    return without
