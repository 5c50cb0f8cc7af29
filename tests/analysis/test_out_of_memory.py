"""The post-mortem of recordings made by hand: devices, fragmentation, several ranks, and pending allocations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from memprof.analysis.out_of_memory.out_of_memory_words import describe_post_mortem, next_steps
from memprof.analysis.out_of_memory.post_mortem import PostMortem, examine
from memprof.analysis.plans.partial_step import examine_partial
from memprof.analysis.report.report_json import post_mortem_to_json
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.schema import Optimizers, OutOfMemory, Storages, Table
from memprof.trace.store import Trace
from tests.building import Module, Op, Storage, make_tables

MIB = 1 << 20
STORAGES = (
    Storage("weight", 4 * MIB, "parameter", "layer.weight", "layer", shape="8x8"),
    Storage("input", MIB, "input", shape="16x8"),
    Storage("hidden", 6 * MIB, module="layer", shape="16x8"),
    Storage("more", 5 * MIB, module="", shape="16x8"),
)
OPS = (
    Op("aten.addmm.default", module="layer", reads=("input", "weight"), makes=("hidden",), stack="/job/a.py:3:forward"),
    Op("aten.gelu.default", module="", reads=("hidden",), makes=("more",), workspace=MIB, stack="/job/a.py:4:forward"),
    Op("aten.mul.Tensor", module="layer", reads=("more",), stack="/job/a.py:5:forward"),
)
#: Of the moment at which the last operator asks: weight, input, hidden, more.
HELD = 16 * MIB


def tables_of(device: str = "cuda:0", **failure: Any) -> dict[type[Table], Table]:
    """Makes the tables of a step that ends in forward, where a request of the last operator failed."""
    tables = make_tables([OPS], STORAGES, [Module("", "Net"), Module("layer")])
    storages = tables[Storages]
    assert isinstance(storages, Storages)
    tables[Storages] = storages.replace(device=storages.device.copy())
    tables[Storages].device[:] = device  # type: ignore[attr-defined]
    row: dict[str, Any] = {
        "time_us": 1.0,
        "device": device,
        "step": 0,
        "op_id": 2,
        "name": "aten.mul.Tensor",
        "phase": "forward",
        "module_id": 1,
        "stack_id": 2,
        "requested_bytes": 5 * MIB,
        "allocated_bytes": HELD,
        "is_caught": False,
        "message": "CUDA out of memory.",
        **failure,
    }
    tables[OutOfMemory] = OutOfMemory.of(**{name: [value] for name, value in row.items()})
    tables[Optimizers] = Optimizers.of(
        optimizer_id=[0],
        name=["torch.optim.adamw.AdamW"],
        parameter_bytes=[4 * MIB],
        state_bytes=[0],
        full_state_bytes=[8 * MIB + 4],
        parameters=[1],
    )
    steps_are_cut(tables)
    return tables


def steps_are_cut(tables: dict[type[Table], Table]) -> None:
    """Makes the step one that was not seen to its end."""
    kind = next(kind for kind in tables if kind.table_name == "steps")
    steps: Any = tables[kind]
    tables[kind] = steps.replace(is_complete=steps.is_complete & False)


def trace_of(*ranks: dict[type[Table], Table]) -> Trace:
    machine = Machine(memory_bytes=1 << 40)
    manifests = [Manifest(target="train.py", rank=rank, machine=machine) for rank in range(len(ranks))]
    return Trace.of(list(zip(manifests, ranks, strict=True)), Path("run.memprof"))


def post_mortem(**failure: Any) -> PostMortem:
    found = examine(trace_of(tables_of(**failure)))
    assert found is not None
    return found


def test_no_failure_no_post_mortem() -> None:
    """A recording in which memory never ran out has none."""
    assert examine(trace_of(make_tables([OPS], STORAGES))) is None


def test_what_was_full_sums_up() -> None:
    """Categories and modules are those of the moment of the request, and each sum is the whole."""
    found = post_mortem()
    assert found.held is not None
    assert found.held.total_bytes == HELD
    assert {part.key: part.bytes for part in found.held.by_category.parts} == {
        "activation": 11 * MIB,
        "parameter": 4 * MIB,
        "input": MIB,
    }
    assert sum(part.bytes for part in found.held.by_module.parts) == HELD
    assert [one.allocated_bytes for one in found.held.largest] == [6 * MIB, 5 * MIB, 4 * MIB]
    assert found.gradients_missing_bytes == 4 * MIB
    assert found.state_missing_bytes == 8 * MIB + 4
    lines = describe_post_mortem(found)
    assert (
        lines[0] == "out of memory: aten.mul.Tensor requested 5.00 MiB on cuda:0 in step 0, forward of layer, a.py:5."
    )
    assert "  by category: 11.00 MiB activation + 4.00 MiB parameter + 1.00 MiB input" in lines
    assert "Still to be allocated: 4.00 MiB of gradients and 8.00 MiB of AdamW's state." in lines


def test_host_memory_does_not_fill_a_device() -> None:
    """Of a job on a device, only what is on that device counts."""
    tables = tables_of()
    storages: Any = tables[Storages]
    storages.device[storages.category == "input"] = "cpu"
    found = examine(trace_of(tables))
    assert found is not None
    assert found.held is not None
    assert found.held.total_bytes == HELD - MIB


def test_fragmentation_is_told_from_want() -> None:
    """Free memory in pieces too small for the request is fragmentation; too little of it is not, nor is the unknown."""
    pieces = {"reserved_bytes": 24 * MIB, "free_bytes": MIB, "total_bytes": 32 * MIB}
    broken = post_mortem(largest_free_bytes=2 * MIB, **pieces)
    assert broken.is_fragmented
    assert any(
        line.startswith(
            "This is fragmentation: 8.00 MiB of the 24.00 MiB reserved were free, the largest block 2.00 MiB."
        )
        and "expandable_segments" in line
        for line in describe_post_mortem(broken)
    )
    assert any("7.00 MiB are held outside torch's allocator" in line for line in describe_post_mortem(broken))
    full = post_mortem(largest_free_bytes=2 * MIB, **{**pieces, "reserved_bytes": 18 * MIB})
    assert not full.is_fragmented
    assert any(line.startswith("Not fragmentation: of the 18.00 MiB") for line in describe_post_mortem(full))
    # Neither what is cached nor what is left on the device is enough by itself, both together are.
    both = post_mortem(largest_free_bytes=2 * MIB, **{**pieces, "reserved_bytes": 18 * MIB, "free_bytes": 3 * MIB})
    assert both.is_fragmented
    limited = post_mortem(largest_free_bytes=2 * MIB, **{**pieces, "reserved_bytes": 18 * MIB, "free_bytes": 9 * MIB})
    assert not limited.is_fragmented
    unknown = post_mortem()
    assert not unknown.is_fragmented
    assert not any("ragmentation" in line for line in describe_post_mortem(unknown))


def test_rank_that_failed_is_told() -> None:
    """Of several ranks it is the one whose request ended the job, the first in time; caught ones do not count."""
    caught = tables_of(is_caught=True, time_us=1.0)
    later, first = tables_of(time_us=9.0), tables_of(time_us=5.0)
    found = examine(trace_of(caught, later, first))
    assert found is not None
    assert found.rank == 2
    assert describe_post_mortem(found)[0].startswith("out of memory in rank 2: ")


def test_next_steps_lead_to_a_plan_in_two_commands_or_by_fit() -> None:
    """The budget is the memory available to torch: its own segments and free memory."""
    found = post_mortem(reserved_bytes=20 * MIB, free_bytes=4 * MIB, total_bytes=32 * MIB)
    commands = next_steps(
        found, "my run.memprof", Manifest(target="train.py", command=("python", "train.py", "-b", "4"))
    )
    assert [command for command, _ in commands] == ["memprof fit --budget 24.00MiB train.py -b 4"]
    card = Manifest(target="train.py", command=("python", "train.py"), machine=Machine(device_name="RTX 4090"))
    assert [command for command, _ in next_steps(found, "run.memprof", card)] == [
        "memprof record --dry-run --device rtx4090 -o whole.memprof train.py",
        "memprof suggest whole.memprof --device rtx4090 --write plan.toml",
    ]
    whole = dataclasses.replace(found, has_whole_step=True)
    assert [command for command, _ in next_steps(whole, "my run.memprof", card)] == [
        "memprof suggest 'my run.memprof' --budget 24.00MiB --write plan.toml",
        "memprof record --plan plan.toml train.py",
    ]


def test_least_that_a_whole_step_needs() -> None:
    """At least what was seen, what was asked for and the state; or what an update holds, where that is more."""
    partial = examine_partial(trace_of(tables_of()))
    assert partial.asked_bytes == 5 * MIB
    assert partial.update_bytes == 4 * MIB + 4 * MIB + 8 * MIB + 4
    assert partial.seen_bytes == HELD + 5 * MIB + 8 * MIB + 4
    assert partial.least_bytes == partial.seen_bytes
    assert partial.batch == 16
    # Input, hidden, more and what was asked for grow: 17 MiB at 16; the weight and the state stay: 12 MiB.
    assert partial.growing_bytes == 17 * MIB
    assert partial.largest_batch(29 * MIB + 4) == 16
    assert partial.largest_batch(28 * MIB) == 15
    assert partial.largest_batch(15 * MIB) == 0


def test_json_has_every_figure_of_the_failed_request() -> None:
    """Raw bytes under the promised keys; what the error does not state is null."""
    found = examine(trace_of(tables_of(reserved_bytes=20 * MIB, free_bytes=MIB, total_bytes=24 * MIB)))
    assert found is not None
    told = post_mortem_to_json(found)
    held, optimizers = told.pop("held"), told.pop("optimizers")
    missing = told.pop("gradients_missing_bytes")
    assert missing == 4 * MIB
    assert told == {
        "rank": 0,
        "failures": 1,
        "caught": False,
        "device": "cuda:0",
        "step": 0,
        "phase": "forward",
        "op": "aten.mul.Tensor",
        "module": "layer",
        "source": "a.py:5",
        "message": "CUDA out of memory.",
        "requested_bytes": 5 * MIB,
        "allocated_bytes": HELD,
        "reserved_bytes": 20 * MIB,
        "cached_bytes": 4 * MIB,
        "largest_free_bytes": None,
        "free_bytes": MIB,
        "total_bytes": 24 * MIB,
        "fragmented": False,
        "room": None,
        "has_whole_step": False,
    }
    assert held["bytes"] == HELD
    assert held["by_category"] == {"activation": 11 * MIB, "parameter": 4 * MIB, "input": MIB}
    assert held["largest"][0] == {
        "bytes": 6 * MIB,
        "category": "activation",
        "name": None,
        "shape": "16x8",
        "module": "layer",
        "source": "a.py:3",
    }
    assert optimizers == [
        {
            "name": "AdamW",
            "state_bytes": 0,
            "full_state_bytes": 8 * MIB + 4,
            "missing_bytes": 8 * MIB + 4,
        }
    ]
