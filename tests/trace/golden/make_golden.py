"""Writes the golden trace of this schema version; run once, when a version is released, and never again for it.

    python -m tests.trace.golden.make_golden

The file stays in the repository for good: every later version must open it (tests/trace/test_manifest.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memprof.trace.manifest import Backend, Capture, Machine, Manifest, Window
from memprof.trace.schema import SCHEMA_VERSION, TABLES, HostMemory, Segments, Table
from memprof.trace.store import write_trace
from tests.building import Module, Op, Storage, Tables, make_tables

FOLDER = Path(__file__).parent


def golden_tables() -> Tables:
    """A warm-up and two recorded steps of a layer of 1024 weights, then an untouched step of 250 us."""
    step = [
        Op(
            "aten.mm.default",
            module="layer",
            reads=["batch", "weight"],
            makes=["output"],
            saves=["batch"],
            workspace=128,
            flops=2048,
            stack="train.py:12:main\ntrain.py:20:<module>",
        ),
        Op(
            "aten.mm.default",
            phase="backward",
            module="layer",
            reads=["batch", "output"],
            makes=["gradient"],
            frees=["output"],
            forward=0,
        ),
        Op("aten.add_.Tensor", phase="optimizer", reads=["gradient"], mutates=["weight"], frees=["gradient"]),
    ]
    storages = [
        Storage("weight", 4096, "parameter", name="layer.weight", module="layer", shape="32x32"),
        Storage("batch", 1024, "input", shape="8x32"),
        Storage("output", 1088, "activation", module="layer", requested=1024, shape="8x32"),
        Storage("gradient", 4096, "gradient", name="layer.weight", module="layer", shape="32x32"),
    ]
    tables = make_tables(
        [step, step, step, []],
        storages,
        [Module("", "Net"), Module("layer", "Linear", parameter_bytes=4096)],
        kinds=["warm_up", "recorded", "recorded", "plain"],
        durations_us=[900.0, 800.0, 700.0, 250.0],
    )
    tables[HostMemory] = HostMemory.of(
        time_us=[1.0, 2.0], pid=[7, 8], role=["trainer", "worker"], rss_bytes=[10_000, 5_000], private_bytes=[8_000, -1]
    )
    tables[Segments] = Segments.of(
        device=["cuda:0"], address=[4096], total_size_bytes=[2**21], segment_type=["small"], is_expandable=[True]
    )
    return {kind: tables[kind] if len(tables.get(kind, ())) else _one_row(kind) for kind in TABLES}


def _one_row(kind: type[Table]) -> Table:
    """A row of values that no column takes for another's, in tables that training steps do not fill."""
    values: dict[str, Any] = {"id": 1, "float": 1.5, "bool": True}
    row = {}
    for place, column in enumerate(kind.columns()):
        text = column.values[-1] if column.values else f"{column.name} text"
        text = "other" if column.is_open else text  # written when it was the last phase
        row[column.name] = [values.get(column.kind, 1000 + place if column.kind == "int" else text)]
    return kind.of(**row)


def golden_manifest(rank: int) -> Manifest:
    """A manifest with every field filled."""
    return Manifest(
        memprof_version="0.1.0",
        torch_version="2.13.0",
        python_version="3.11.7",
        created_us=1.7952576e15,
        command=("python", "train.py"),
        target="train.py",
        machine=Machine(device_name="a processor", device_kind="cpu", cores=2, memory_bytes=2**34, os="Linux 6.8"),
        rank=rank,
        world_size=2,
        pid=7 + rank,
        plan={"policies": []},
        backend=Backend(name="cpu-native", sees=("allocations",), blind_spots=("other libraries",)),
        capture=Capture(is_complete=False, ends_at="step 4, forward", reason="killed by signal 9", exit_status=-9),
        window=Window(skip=1, steps=2, stop=False),
        op_times="none",
        notes=("made by hand",),
    )


if __name__ == "__main__":
    write_trace(
        FOLDER / f"schema-{SCHEMA_VERSION}.memprof", [(golden_manifest(rank), golden_tables()) for rank in (0, 1)]
    )
