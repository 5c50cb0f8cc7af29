"""How large a trace is."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from memprof.trace.manifest import Manifest
from memprof.trace.schema import (
    PHASES,
    AllocatorEvents,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    Saved,
    Stacks,
    Steps,
    Storages,
    Uses,
)
from memprof.trace.store import Trace, write_trace
from tests.building import Tables

STEPS = 5
OPS = 1500  # of each step
STORAGES = 900  # born in each step
MODULES = 100
STACKS = 200


def job_like_tables(seed: int) -> Tables:
    """Tables as a real job gives them: steps repeat what they do; addresses and times only nearly."""
    random = np.random.default_rng(seed)
    steps = np.repeat(np.arange(STEPS), OPS)
    op_ids = np.arange(STEPS * OPS)
    started = 1.7952576e15 + np.cumsum(random.lognormal(2.5, 1.0, STEPS * OPS))

    def every_step(values: np.ndarray) -> np.ndarray:
        return np.tile(values, STEPS)

    def moved(ids: np.ndarray, each: int) -> np.ndarray:
        return (ids + np.arange(STEPS)[:, None] * each).ravel()

    born = np.sort(random.integers(0, OPS, STORAGES))
    died = np.minimum(born + random.geometric(0.02, STORAGES), OPS - 1)
    sizes = random.choice(2 ** np.arange(8, 22), STORAGES)
    used = np.sort(random.integers(0, OPS, 3 * OPS))
    touched = np.maximum(np.searchsorted(born, used) - random.geometric(0.05, 3 * OPS), 0)
    saved = np.sort(random.integers(0, STORAGES, 300))
    taken = np.sort(random.integers(0, OPS, 3 * OPS // 2))
    freed = np.minimum(taken + random.geometric(0.1, 3 * OPS // 2), OPS - 1)
    event_ops = np.concatenate([taken, freed])
    order = np.argsort(event_ops, kind="stable")
    heap = 0x55D000000000 + 64 * random.integers(0, 2**20, 400)
    addresses = np.concatenate(
        [np.tile(heap[random.integers(0, len(heap), 3 * OPS // 2)], 2)[order] for _ in range(STEPS)]
    )
    events = moved(event_ops[order], OPS)
    counters = every_step(np.cumsum(random.integers(-(2**20), 2**20, OPS)) + 2**40)
    return {
        Modules: Modules.of(
            module_id=range(MODULES),
            name=[f"blocks.{row // 8}.part{row % 8}" for row in range(MODULES)],
            type=[f"Part{row % 8}" for row in range(MODULES)],
        ),
        ModuleCalls: ModuleCalls.of(
            module_call_id=range(STEPS * MODULES),
            module_id=every_step(np.arange(MODULES)),
            step=np.repeat(np.arange(STEPS), MODULES),
            first_op_id=moved(np.sort(random.integers(0, OPS, MODULES)), OPS),
        ),
        Steps: Steps.of(
            step=range(STEPS),
            kind=["recorded"] * STEPS,
            first_op_id=np.arange(STEPS) * OPS,
            last_op_id=np.arange(1, STEPS + 1) * OPS - 1,
        ),
        Ops: Ops.of(
            op_id=op_ids,
            step=steps,
            phase=every_step(np.array(PHASES, dtype=object)[np.sort(random.integers(0, 3, OPS))]),
            module_id=every_step(random.integers(0, MODULES, OPS)),
            name=every_step(np.array([f"aten.op{kind}.default" for kind in random.integers(0, 80, OPS)], dtype=object)),
            kind=["compute"] * len(op_ids),
            start_us=started,
            duration_us=every_step(random.lognormal(2.0, 1.5, OPS)) * random.normal(1.0, 0.1, len(op_ids)),
            flops=every_step(random.integers(0, 2**30, OPS) * (random.random(OPS) < 0.2)),
            read_bytes=every_step(random.choice(sizes, OPS)),
            written_bytes=every_step(random.choice(sizes, OPS)),
            forward_op_id=moved(np.where(random.random(OPS) < 0.5, random.integers(0, OPS, OPS), -1), OPS),
            stack_id=every_step(random.integers(0, STACKS, OPS)),
            workspace_bytes=every_step(random.choice(sizes, OPS) * (random.random(OPS) < 0.1)),
        ),
        Storages: Storages.of(
            storage_id=range(STEPS * STORAGES),
            category=["activation"] * STEPS * STORAGES,
            module_id=every_step(random.integers(0, MODULES, STORAGES)),
            device=["cpu"] * STEPS * STORAGES,
            requested_bytes=every_step(sizes),
            allocated_bytes=every_step(sizes),
            created_op_id=moved(born, OPS),
            freed_op_id=moved(died, OPS),
            shape=[f"8x{size // 32}" for size in every_step(sizes)],
            dtype=["float32"] * STEPS * STORAGES,
        ),
        Uses: Uses.of(
            op_id=moved(used, OPS),
            storage_id=moved(touched, STORAGES),
            role=every_step(np.array(["read", "read", "write"], dtype=object)[random.integers(0, 3, 3 * OPS)]),
        ),
        Saved: Saved.of(
            storage_id=moved(saved, STORAGES),
            forward_op_id=moved(born[saved], OPS),
            released_op_id=moved(died[saved], OPS),
        ),
        Memory: Memory.of(
            op_id=op_ids,
            time_us=started + 5.0,
            device=["cpu"] * len(op_ids),
            allocated_bytes=counters,
            active_bytes=counters,
        ),
        AllocatorEvents: AllocatorEvents.of(
            index=range(len(events)),
            time_us=started[events] + random.random(len(events)),
            device=["cpu"] * len(events),
            action=every_step(np.where(order < 3 * OPS // 2, "alloc", "free").astype(object)),
            address=addresses,
            size_bytes=every_step(random.choice(sizes, 3 * OPS)),
            op_id=events,
        ),
        Stacks: Stacks.of(
            stack_id=range(STACKS),
            frames=["\n".join(f"model.py:{row + line}:part{row % 8}" for line in range(8)) for row in range(STACKS)],
        ),
    }


def test_a_trace_of_five_steps_is_small(tmp_path: Path) -> None:
    """Five steps of 1,500 operators with 22,500 allocator events fit into 170 kB."""
    path = tmp_path / "run.memprof"
    write_trace(path, [(Manifest(), job_like_tables(seed=1))])
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert Trace.open(path).table(AllocatorEvents).index.tolist() == list(range(STEPS * 3 * OPS))
    assert path.stat().st_size <= 170_000, sizes
