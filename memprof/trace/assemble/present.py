"""Assembles what was alive in a running job at one moment into the tables of a trace without a history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.describe import JobRecords, describe_start, machine_of
from memprof.trace.assemble.device_events import device_samples
from memprof.trace.assemble.memory.categories import SETTLED
from memprof.trace.files.spool import ACTIVATION, HELD, INPUT, PARAMETER, Spool, read_spool
from memprof.trace.importers.columns import read_segments
from memprof.trace.manifest import Backend, Capture, Manifest
from memprof.trace.schema import (
    NONE,
    DeviceMemory,
    Ints,
    Memory,
    Modules,
    Ops,
    Segments,
    Steps,
    Storages,
    Table,
)

#: Name of the backend of such a trace.
PRESENT = "attached"
_NOW = "(in use now)"
_BACKEND = Backend(
    name=PRESENT,
    sees=("tensors that Python and autograd's graphs hold; on CUDA, every block of the allocator",),
    blind_spots=("who allocated them, and when", "on CPU, memory that only C++ holds (such as DDP's buckets)"),
)


def read_present(folder: Path) -> list[tuple[Manifest, dict[type[Table], Table]]]:
    """Returns the manifest and tables of each device, the one with most bytes first, a GPU before the CPU.

    Raises:
        OSError: There is nothing to read.
    """
    spool = read_spool(folder)
    kinds = texts.tensor_kinds(spool)
    found = _storages(spool, kinds)
    sizes = Counter[str]()
    for one in found.values():
        sizes[one["device"]] += one["bytes"]
    devices = sorted(sizes or ["cpu"], key=lambda device: (device == "cpu", -sizes[device]))
    return [(_manifest(folder, spool, device), _tables(spool, found, device)) for device in devices]


def _storages(spool: Spool, kinds: texts.TensorKinds) -> dict[int, dict[str, Any]]:
    """Returns each storage by its address: bytes, device, category, name, module and kind of tensor."""
    names, facts = texts.listed(spool, "names"), spool.columns("facts")
    found: dict[int, dict[str, Any]] = {}
    columns = (facts[name].tolist() for name in ("address", "size_bytes", "category", "name", "module", "tensor"))
    for address, size, category, name, module, tensor in zip(*columns, strict=True):
        one = found.setdefault(address, {"bytes": size, "device": kinds.device[tensor], "facts": {}})
        one["bytes"] = max(one["bytes"], size)
        known = one["facts"].get(category)
        if known is None or (known[0] == NONE and name != NONE):
            one["facts"][category] = (name, module, tensor)
    weights = {one["facts"][PARAMETER][2] for one in found.values() if PARAMETER in one["facts"]}
    families = kinds.families()
    inputs = {int(families[one["facts"][INPUT][2]]) for one in found.values() if INPUT in one["facts"]}
    for one in found.values():
        code, one["category"] = _category(one, weights, inputs, families)
        name, module, tensor = one["facts"][code]
        one["name"] = "" if name == NONE else names[name]
        one["module"], one["tensor"] = module, tensor
    for device, address, size, requested, _, is_pending in _blocks(spool):
        known = found.get(address)
        if known is not None:
            known["bytes"], known["allocated"] = requested, size
        elif not is_pending and not _is_within(found, address, size):
            found[address] = {
                "bytes": requested, "allocated": size, "device": f"cuda:{device}", "category": "unknown",
                "name": "", "module": NONE, "tensor": NONE,
            }  # fmt: skip
    return {address: one for address, one in found.items() if one["bytes"]}


def _is_within(found: dict[int, dict[str, Any]], address: int, size: int) -> bool:
    return any(address < other < address + size for other in found) if size > 2**20 else False


def _category(one: dict[str, Any], weights: set[int], inputs: set[int], families: Ints) -> tuple[int, str]:
    facts = one["facts"]
    for code, name in SETTLED:
        if code in facts:
            return code, name
    if INPUT in facts:
        return INPUT, "input"
    if HELD in facts:
        name, _, tensor = facts[HELD]
        is_alike = name != NONE or int(families[tensor]) in inputs
        return HELD, "input" if is_alike and tensor not in weights else "unknown"
    is_saved = facts[ACTIVATION][0] != NONE  # by a node, which names it; others are computed, and kept by variables
    return ACTIVATION, "activation" if is_saved else "temporary"


def _blocks(spool: Spool) -> list[Sequence[int]]:
    records = spool.records.get("segments", [])
    return list(records[-1]["blocks"]) if records else []


def _tables(spool: Spool, found: dict[int, dict[str, Any]], device: str) -> dict[type[Table], Table]:
    kinds = texts.tensor_kinds(spool)
    own = [one for _, one in sorted(found.items()) if one["device"] == device]
    count = len(own)
    numbers = [one["tensor"] for one in own]
    requested = np.array([one["bytes"] for one in own], dtype=np.int64)
    allocated = np.array([one.get("allocated", one["bytes"]) for one in own], dtype=np.int64)
    at = float(spool.records["start"][0]["time_ns"]) / 1000
    segments = read_segments(
        [
            {**one, "segment_type": one["type"], "segment_pool_id": one["pool"]}
            for one in (spool.records.get("segments") or [{"segments": []}])[-1]["segments"]
            if f"cuda:{one['device']}" == device
        ],
        device,
    )
    rss = spool.rows["rss"][:, 2].tolist()
    return {
        Modules: texts.module_table(spool),
        Steps: Steps.of(step=[0], kind=["recorded"], start_us=[0.0], duration_us=[np.nan], micro_batches=[0],
                        optimizer_updates=[0], first_op_id=[0], last_op_id=[0], is_complete=[True]),
        Ops: Ops.of(op_id=[0], step=[0], phase=["other"], module_id=[NONE], name=[_NOW], kind=["allocation"],
                    start_us=[0.0], stream=[0], stack_id=[NONE]),
        Storages: Storages.of(
            storage_id=np.arange(count),
            category=texts.as_texts([one["category"] for one in own]),
            name=texts.as_texts([one["name"] for one in own]),
            module_id=np.array([one["module"] for one in own], dtype=np.int64),
            device=texts.as_texts([device] * count),
            requested_bytes=requested,
            allocated_bytes=allocated,
            created_op_id=np.full(count, NONE),
            freed_op_id=np.full(count, NONE),
            shape=texts.look_up(kinds.shape, np.array(numbers, dtype=np.int64)),
            dtype=texts.look_up(kinds.dtype, np.array(numbers, dtype=np.int64)),
        ),
        Memory: Memory.of(
            op_id=[0],
            time_us=[at],
            device=[device],
            allocated_bytes=[int(allocated.sum())],
            active_bytes=[int(segments.active_size_bytes.sum()) if len(segments) else int(allocated.sum())],
            reserved_bytes=[int(segments.total_size_bytes.sum()) if len(segments) else NONE],
            host_rss_bytes=[rss[-1] if rss else NONE],
        ),
        Segments: segments,
        DeviceMemory: device_samples(spool),
    }  # fmt: skip


def _manifest(folder: Path, spool: Spool, device: str) -> Manifest:
    common = describe_start(spool, JobRecords(folder, {}, None))
    return replace(common, machine=machine_of(spool, device, common.machine), backend=_BACKEND, capture=Capture())
