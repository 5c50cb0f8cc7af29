"""Creates recordings of any size that resemble training: layers allocate in forward and free in backward.

Every operator allocates one storage. In forward, every third lives until its backward; the others are freed within
three operators. Backward allocates gradients, one per layer until the end of the update. Sizes are random,
and every step is like the first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memprof.trace.manifest import Machine, Manifest
from memprof.trace.schema import NONE, Modules, Ops, Saved, Stacks, Steps, Storages, Table
from memprof.trace.store import write_trace

#: Operators of a layer, in its forward and in its backward.
_FORWARD, _BACKWARD = 12, 18
_OPERATORS = ("aten.addmm.default", "aten.native_layer_norm.default", "aten.gelu.default", "aten.view.default")
_CATEGORIES = ("activation", "temporary", "gradient", "parameter", "optimizer_state")
_ACTIVATION, _TEMPORARY, _GRADIENT, _PARAMETER, _STATE = range(len(_CATEGORIES))


def write_synthetic(path: Path, events: int, *, layers: int = 32, seed: int = 0) -> None:
    """Writes a recording.

    Args:
        path: The .memprof file.
        events: Approximate number of allocations and frees; two for each operator.
        layers: Layers of the model; more make longer steps.
        seed: Of the sizes.
    """
    write_trace(path, [(_manifest(), make_synthetic(events, layers=layers, seed=seed))])


def make_synthetic(events: int, *, layers: int = 32, seed: int = 0) -> dict[type[Table], Table]:
    """Returns the tables of such a recording; arguments as in ``write_synthetic``."""
    lives = _one_step(layers)
    width = len(lives["phase"])
    steps = max(1, round(events / 2 / width))
    ops = steps * width
    random = np.random.default_rng(seed)
    base = np.repeat(np.arange(steps) * width, width)
    code = np.tile(lives["category"], steps)
    fixed = 3 * layers
    sizes = 512 * random.integers(1, 4_000, ops + fixed)
    created = np.concatenate([np.full(fixed, NONE), np.arange(ops)])
    freed = np.concatenate([np.full(fixed, NONE), np.tile(lives["freed"], steps) + base])
    kept = np.flatnonzero(code == _ACTIVATION)
    module = np.tile(lives["module"], steps)
    return {
        Modules: _modules(layers),
        Stacks: Stacks.of(stack_id=range(layers), frames=[_frames(layer) for layer in range(layers)]),
        Steps: Steps.of(
            step=np.arange(steps),
            kind=["recorded"] * steps,
            start_us=np.arange(steps) * 1e6,
            duration_us=np.full(steps, 1e6),
            micro_batches=np.ones(steps, dtype=np.int64),
            optimizer_updates=np.ones(steps, dtype=np.int64),
            first_op_id=np.arange(steps) * width,
            last_op_id=np.arange(1, steps + 1) * width - 1,
            is_complete=np.ones(steps, dtype=np.bool_),
        ),
        Ops: Ops.of(
            op_id=np.arange(ops),
            step=np.repeat(np.arange(steps), width),
            phase=np.tile(_texts(("forward", "backward", "optimizer"))[lives["phase"]], steps),
            module_id=module,
            name=_texts(_OPERATORS)[np.arange(ops) % len(_OPERATORS)],
            kind=_texts(("compute",))[np.zeros(ops, dtype=np.int64)],
            start_us=np.arange(ops) * 10.0,
            duration_us=np.full(ops, 9.0),
            forward_op_id=np.full(ops, NONE),
            stack_id=np.maximum(module - 1, 0),
            workspace_bytes=np.where(random.random(ops) < 0.05, 512 * random.integers(0, 9_000, ops), 0),
        ),
        Storages: Storages.of(
            storage_id=np.arange(ops + fixed),
            category=_texts(_CATEGORIES)[
                np.concatenate([np.repeat([_PARAMETER, _STATE, _STATE], layers), code]).astype(np.int64)
            ],
            name=np.concatenate([_texts([f"layers.{row % layers}.weight" for row in range(fixed)]), np.tile("", ops)]),
            module_id=np.concatenate([1 + np.arange(fixed) % layers, module]),
            device=_texts(("cuda:0",))[np.zeros(ops + fixed, dtype=np.int64)],
            requested_bytes=sizes,
            allocated_bytes=sizes,
            created_op_id=created,
            freed_op_id=freed,
            shape=_texts([f"8x{128 * (1 + row)}" for row in range(64)])[random.integers(0, 64, ops + fixed)],
            dtype=_texts(("float32", "bfloat16"))[random.integers(0, 2, ops + fixed)],
        ),
        Saved: Saved.of(
            storage_id=fixed + kept, forward_op_id=kept, module_id=module[kept], released_op_id=freed[fixed + kept]
        ),
    }


def _one_step(layers: int) -> dict[str, np.ndarray]:
    """Returns the phase, module, category and end of what each operator of a step makes; ends are rows of the step."""
    forward, backward = layers * _FORWARD, layers * _BACKWARD
    width = forward + backward + 2 * layers
    at = np.arange(width)
    is_forward, is_update = at < forward, at >= forward + backward
    layer = np.where(is_forward, at // _FORWARD, layers - 1 - (at - forward) // _BACKWARD)
    layer[is_update] = np.arange(2 * layers) // 2
    place = np.where(is_forward, at % _FORWARD, (at - forward) % _BACKWARD)
    is_activation = is_forward & (place % 3 == 0)
    is_gradient = ~is_forward & ~is_update & (place == 5)
    mirror = forward + (layers - 1 - layer) * _BACKWARD + (_FORWARD - place) * _BACKWARD // _FORWARD - 1
    freed = at + at % 3
    freed[is_activation] = mirror[is_activation]
    freed[is_gradient] = width - 1
    category = np.where(is_activation, _ACTIVATION, np.where(is_gradient, _GRADIENT, _TEMPORARY))
    return {
        "phase": np.where(is_forward, 0, np.where(is_update, 2, 1)),
        "module": 1 + layer,
        "category": category,
        "freed": np.minimum(freed, width - 1),
    }


def _modules(layers: int) -> Modules:
    return Modules.of(
        module_id=range(layers + 1),
        name=["", *(f"layers.{layer}" for layer in range(layers))],
        type=["Model", *["Block"] * layers],
        parent_id=[NONE, *[0] * layers],
        parameter_bytes=[0] * (layers + 1),
    )


def _frames(layer: int) -> str:
    return f"train.py:{10 + layer}:forward\n/site-packages/torch/nn/modules/module.py:1773:_wrapped_call_impl"


def _manifest() -> Manifest:
    machine = Machine(device_name="synthetic", device_kind="cuda", memory_bytes=2**37, capacity_bytes=2**36)
    return Manifest(target="train.py", torch_version="2.13.0", machine=machine)


def _texts(texts: object) -> np.ndarray:
    return np.array(list(texts), dtype=object)  # type: ignore[call-overload]
