"""Keeps out of the dry run what DTensor does besides the work of a rank: shapes of whole tensors, and random states."""

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
        changed: Any = op_schema.args_schema[0] if op_schema.args_schema else None
        if op_schema.is_inplace_op() and getattr(changed, "tensor_meta", None) is not None:
            return changed.tensor_meta  # drawing random numbers on a GPU needs a generator of its own
        with _disable_current_modes():
            return original(this, op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate


def leave_out_random_states() -> None:
    """Makes DTensor draw random numbers as other tensors do.

    In a real run it keeps the ranks' states of the generator in step, with copies of 16 bytes to the device and back.
    """
    from torch.distributed.tensor import _dispatch, _random

    modules: tuple[Any, ...] = (_dispatch, _random)
    for module in modules:
        module.is_rng_supported_mesh = lambda _: False


def show_local_devices() -> None:
    """Makes tensors that wrap a rank's own part report its device, also where no mode answers for them."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    whole: Any = DTensor
    whole.device = property(lambda tensor: tensor._local_tensor.device)
    awaited: Any = AsyncCollectiveTensor
    awaited.device = property(lambda tensor: tensor.elem.device)
