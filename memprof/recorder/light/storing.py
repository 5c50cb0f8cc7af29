"""Observes where a job saves and loads checkpoints, for whole runs, in which no operator and no stack is recorded.

As for module calls, torch's own functions are recompiled with a call before and after their bodies, which keeps
tracebacks through them as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from memprof.recorder.calls.modules import wrap_body
from memprof.recorder.calls.recompiled import recompiled
from memprof.trace.files.spool import LOADING, SAVING

_BEGIN, _END = "__memprof_begin_storing__", "__memprof_end_storing__"


class StoringObserver:
    """Calls `begin(phase)` before and `end(token, error)` after each call that saves or loads, while installed.

    `begin` returns a token, or None for a call that is not observed; `end` is then not called. Neither may raise.
    """

    def __init__(self, begin: Callable[[int], Any], end: Callable[[Any, BaseException | None], None]) -> None:
        """Changes nothing yet."""
        self._callbacks: dict[str, Any] = {_BEGIN: begin, _END: end}
        self._originals: list[tuple[FunctionType, CodeType]] = []

    def install(self) -> None:
        """Starts observing torch's functions; one of another form, of another torch, is left alone."""
        for phase, functions in (
            (SAVING, (torch.save, torch.nn.Module.state_dict, Optimizer.state_dict)),
            (LOADING, (torch.load, torch.nn.Module.load_state_dict, Optimizer.load_state_dict)),
        ):
            for function in functions:
                own: Any = inspect.unwrap(function)
                if not str(getattr(own, "__module__", "")).startswith("torch."):
                    continue  # replaced by the job: such calls stay in the phase around them
                try:
                    code = recompiled(own, partial(wrap_body, entry=f"{_BEGIN}({phase})", leave=_END))
                except RuntimeError:
                    continue  # another torch
                own.__globals__.update(self._callbacks)
                self._originals.append((own, own.__code__))
                own.__code__ = code

    def remove(self) -> None:
        """Restores torch's own code; calls in progress still end through `end`."""
        for function, code in self._originals:
            function.__code__ = code
        self._originals.clear()
