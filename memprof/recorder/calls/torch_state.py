"""torch's own state of a thread (a graph that is traced, hooks for saved tensors), and its operators by their names."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint

_C: Any = torch._C  # its stub lacks _set_tracing_state
_state = _C._get_tracing_state
_set_state = _C._set_tracing_state
_TRACER = _C._dispatch_key_parse("Tracer")
_CONVOLUTION = torch.ops.aten.convolution.default
_NOTHING: AbstractContextManager[None] = nullcontext()
_CHECKPOINT = torch.utils.checkpoint.__name__
_is_enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
#: What `hooks_of_job` returns where the job has disabled all hooks, and where a checkpoint's are innermost.
DISABLED, CHECKPOINT = -1, -2


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


def top_hooks() -> tuple[Any, Any] | None:
    """Returns the active pack and unpack hooks for saved tensors, None if there are none."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    pair: tuple[Any, Any] | None = top(True)
    return pair


def is_in_checkpoint() -> bool:
    """Whether a region of ``checkpoint(use_reentrant=False)`` runs, in forward or again in backward."""
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINT


def hooks_of_job() -> int:
    """Returns which hooks of the job are the innermost: a number that no others have while these are active.

    Returns:
        0 without hooks, and for those of a plan; else DISABLED, CHECKPOINT or another number.
    """
    hooks = top_hooks()
    if hooks is None:
        # Transforms of torch.func disable hooks, too; their operators are known by their stacks.
        return 0 if _is_enabled() or torch._C._functorch.peek_interpreter_stack() is not None else DISABLED
    module = getattr(hooks[0], "__module__", None) or ""
    if module == _CHECKPOINT:
        return CHECKPOINT
    return 0 if module.startswith("memprof.") else id(hooks[0])


def packets(names: Iterable[str] | str) -> frozenset[Any]:
    """Returns operators of torch's own, each with all overloads; names in one text are divided by spaces."""
    return frozenset(getattr(torch.ops.aten, name) for name in (names.split() if isinstance(names, str) else names))


def overloads(names: Iterable[str] | str) -> frozenset[Any]:
    """Returns the default overload of each."""
    return frozenset(packet.default for packet in packets(names))
