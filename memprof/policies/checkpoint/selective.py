"""Keeps the outputs of some operators of a region: torch's selective checkpointing, for these operators alone."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memprof.policies.checkpoint.kinds import KeptOperators


def selective_contexts(keep: KeptOperators) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the first run and of the recompute."""
    calls: Counter[tuple[bool, str]] = Counter()

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operator)
        calls[context.is_recompute, name] += 1  # some versions of torch ask again in the recompute
        # An operator that drew random numbers must draw them again, or those after it would get different ones.
        if keep.has(name, calls[context.is_recompute, name]) and not _drops_out(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts
    before, again = contexts(decide)
    for mode in (before, again):
        kind: Any = type(mode)
        mode.__class__ = _only_kept(kind, keep.names)
    return before, again


@cache
def _only_kept(kind: Any, names: frozenset[str]) -> Any:
    """Makes torch's modes of both runs look at kept operators only, which is also faster.

    Torch's modes count every operator, and the second raises where one runs more often than in forward. That is
    legitimate under autocast: a module's second call reuses cached weight casts, but its recomputation casts them
    again.
    """
    kept = frozenset(operator for name in names if (operator := operator_named(name)) is not None)

    class OnlyKept(kind):  # type: ignore[misc]  # torch's class is private
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in kept:
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    return OnlyKept


def operator_named(name: str) -> Any:
    """Returns an operator of torch by its name in the dispatcher; None where this version has none of that name."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
        if operator is None:
            return None
    return operator if isinstance(operator, torch._ops.OpOverload) else None


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call of an attention operator applies dropout."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return False
