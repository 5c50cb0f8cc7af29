"""Hides from a job that its tensors are fake: libraries take such tensors for a sign that a graph is being traced.

transformers' ``is_tracing``, for example, keeps the whole mask of causal attention then, since a graph must not depend
on values. torch itself and memprof see the class as it is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch._subclasses
from torch._subclasses.fake_tensor import FakeTensor

_ASKING = ("memprof", "torch")


class _NoTensor:
    """A class without instances, which jobs see in place of the class of fake tensors."""


class _Subclasses(ModuleType):
    """The module ``torch._subclasses`` of a dry run."""

    @property
    def FakeTensor(self) -> Any:  # noqa: N802  # torch's name
        """The class of fake tensors for torch and memprof, and one without instances for the job.

        TorchDynamo, which reads attributes for the job's code that it traces, does not name the class.
        """
        frame = sys._getframe(1)
        is_asking = str(frame.f_globals.get("__name__")).partition(".")[0] in _ASKING
        return FakeTensor if is_asking and "FakeTensor" in frame.f_code.co_names else _NoTensor


def hide_fakes() -> None:
    """Hides the class from the job, for good."""
    vars(torch._subclasses).pop("FakeTensor", None)  # TorchDynamo reads modules by their dictionaries
    torch._subclasses.__class__ = _Subclasses
