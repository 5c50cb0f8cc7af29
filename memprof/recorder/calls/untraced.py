"""Keeps what memprof reads of a tensor out of a graph that ``torch.jit.trace`` is making of the job."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_C: Any = torch._C  # its stub lacks _set_tracing_state
_state = _C._get_tracing_state
_set_state = _C._set_tracing_state
_TRACER = _C._dispatch_key_parse("Tracer")
_CONVOLUTION = torch.ops.aten.convolution.default
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Untraced(AbstractContextManager[None]):
    """Stops tracing on this thread until it is left."""

    def __init__(self, state: Any) -> None:
        self._tracing = state
        # Where torch runs an operator that it traces, that may not be stopped and begun again. So lift that, too.
        excluded = _C._dispatch_tls_local_exclude_set().remove(_TRACER)
        self._keys = _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)

    def __enter__(self) -> None:
        self._keys.__enter__()
        _set_state(None)

    def __exit__(self, *error: object) -> None:
        _set_state(self._tracing)
        self._keys.__exit__(*error)


def untraced() -> AbstractContextManager[None]:
    """Returns what stops tracing for the time of a ``with``; where nothing is traced, it does nothing."""
    state = _state()
    return _NOTHING if state is None else _Untraced(state)


def traced_inside(func: Any) -> AbstractContextManager[Any]:
    """Returns what lets torch trace the operators inside a convolution, as it does where no mode comes in between.

    Args:
        func: The operator about to be run; any other one is traced by itself.
    """
    if func is not _CONVOLUTION or _state() is None:
        return _NOTHING
    included = _C._dispatch_tls_local_include_set() | _C.DispatchKeySet(_TRACER)
    guard: AbstractContextManager[Any] = _C._ForceDispatchKeyGuard(
        included, _C._dispatch_tls_local_exclude_set().remove(_TRACER)
    )
    return guard


def is_traced_inside(func: Any) -> bool:
    """Whether torch traces the operators inside an operator, and not it."""
    return func is _CONVOLUTION
