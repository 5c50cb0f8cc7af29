"""Keeps memprof's tensor reads out of a graph that ``torch.jit.trace`` is recording of the job."""

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
    """Suspends tracing on this thread until it exits."""

    def __init__(self, state: Any) -> None:
        self._tracing = state
        # While torch runs a traced operator, tracing cannot be suspended and resumed. So lift that exclusion, too.
        excluded = _C._dispatch_tls_local_exclude_set().remove(_TRACER)
        self._keys = _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)

    def __enter__(self) -> None:
        self._keys.__enter__()
        _set_state(None)

    def __exit__(self, *error: object) -> None:
        _set_state(self._tracing)
        self._keys.__exit__(*error)


def untraced() -> AbstractContextManager[None]:
    """Returns a context manager that suspends tracing; a no-op if nothing is being traced."""
    state = _state()
    return _NOTHING if state is None else _Untraced(state)


def traced_inside(func: Any) -> AbstractContextManager[Any]:
    """Returns a context that lets torch trace the operators inside a convolution, as it does without a dispatch mode.

    Args:
        func: The operator about to run; operators other than convolution are traced as one.
    """
    if func is not _CONVOLUTION or _state() is None:
        return _NOTHING
    included = _C._dispatch_tls_local_include_set() | _C.DispatchKeySet(_TRACER)
    guard: AbstractContextManager[Any] = _C._ForceDispatchKeyGuard(
        included, _C._dispatch_tls_local_exclude_set().remove(_TRACER)
    )
    return guard


def is_traced_inside(func: Any) -> bool:
    """Whether torch traces the operators inside an operator, instead of the operator."""
    return func is _CONVOLUTION
