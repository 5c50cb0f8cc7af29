"""Keeps DTensor's shape propagation out of the dry run: it runs operators on whole tensors, which no rank holds."""

from __future__ import annotations

from functools import wraps
from typing import Any


def leave_out_shape_propagation() -> None:
    """Makes DTensor find shapes outside the dry run, as it does in a real run, where its tensors have no memory."""
    # Lazy: only distributed jobs need it, and it takes half a second.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    @wraps(original)
    def propagate(this: Any, op_schema: Any) -> Any:
        with _disable_current_modes():
            return original(this, op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate
