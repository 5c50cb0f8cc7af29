"""Known causes are said with their bytes where they hold, and not where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from memprof.analysis.report.sources import find_sources
from memprof.analysis.report.why import find_causes
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.log import RawLog
from memprof.recorder.notes import Unused
from memprof.recorder.steps.usages import Usages
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.schema import Holders
from memprof.trace.step import Step
from memprof.trace.usages import COLLECTOR_OFF, IDLE_CHECKPOINTS, modules_in
from tests.building import Module, Op, Storage, make_step

LINE = "/job/train.py:17:forward"


def causes(*, own: int, copied: int, product: str = "aten.bmm.default") -> tuple[str, ...]:
    """Returns the causes in a forward that expands, copies and multiplies a table."""
    ops = [
        Op("aten.expand.default", reads=["table"], stack=LINE),
        Op("aten.clone.default", reads=["table"], makes=["copy"], stack=LINE),
        Op(product, reads=["copy"], makes=["out"], stack=LINE),
    ]
    step = make_step(ops, [Storage("table", own, "parameter"), Storage("copy", copied), Storage("out", 1024)])
    return find_causes(step, find_sources(step.stacks), Holders.empty(), 2, own + copied + 1024)


def test_an_operand_that_matmul_expands_is_named() -> None:
    """128 KiB copied to 16 MiB, with the line and the remedy."""
    (sentence,) = causes(own=131_072, copied=16_777_216)
    assert sentence.startswith("matmul at train.py:17 expands an operand of 128.00 KiB and copies it: 16.00 MiB")
    assert "torch.einsum" in sentence


@pytest.mark.parametrize(
    ("own", "product"), [(16_777_216, "aten.bmm.default"), (131_072, "aten.mul.Tensor")], ids=["copy", "no-product"]
)
def test_other_copies_are_not(own: int, product: str) -> None:
    """A copy of as many bytes, and one that no batched product reads, say nothing."""
    assert causes(own=own, copied=16_777_216, product=product) == ()


def test_weights_copied_in_another_type_are_summed() -> None:
    """Two weights of 2 MiB in bfloat16 take 2 MiB more; an activation in another type is none of them."""
    ops = [Op("aten._to_copy.default", reads=[f"w{i}"], makes=[f"c{i}"]) for i in range(3)]
    weights = [Storage(f"w{i}", 2 << 20, "parameter" if i < 2 else "activation") for i in range(3)]
    step = make_step(ops, [*weights, *(Storage(f"c{i}", 1 << 20, dtype="bfloat16") for i in range(3))])
    (sentence,) = find_causes(step, find_sources(step.stacks), Holders.empty(), 2, 9 << 20)
    assert sentence.startswith("2.00 MiB at the peak are copies of 2 weights in another type")


def step_of(ops: list[Op], storages: list[Storage], *usages: str, kind: str = "Linear") -> Step:
    """Returns a step of a model of one module, with what else the job does."""
    return replace(make_step(ops, storages, [Module("", kind), Module("layer")]), usages=frozenset(usages))


def named(step: Step, peak_op: int, peak_bytes: int, holders: Holders | None = None) -> list[str]:
    """Returns the bytes that causes name, with their sentences."""
    return list(find_causes(step, find_sources(step.stacks), holders or Holders.empty(), peak_op, peak_bytes))


def test_weights_that_every_call_copies_anew_are_not_counted_twice() -> None:
    """Three calls that each copy the same 2 MiB in bfloat16 keep 3 MiB: autocast without its cache."""
    ops = [Op("aten._to_copy.default", reads=["w"], makes=[f"c{i}"]) for i in range(3)]
    storages = [Storage("w", 2 << 20, "parameter"), *(Storage(f"c{i}", 1 << 20, dtype="bfloat16") for i in range(3))]
    step = make_step(ops, storages)
    (sentence,) = named(step, 2, 5 << 20)
    assert sentence.startswith("3.00 MiB at the peak are 3 copies of 1 weight in another type")
    assert "unless cache_enabled is False" in sentence


@pytest.mark.parametrize(
    ("kinds", "usages", "size"),
    [
        (["cycle", "cycle"], [COLLECTOR_OFF], "3.00 MiB"),
        (["cycle", "global"], [COLLECTOR_OFF], "1.00 MiB"),
        (["global", "global"], [COLLECTOR_OFF], ""),
        (["cycle", "cycle"], [], ""),
    ],
)
def test_tensors_in_cycles_are_named_with_the_collector_off(kinds: list[str], usages: list[str], size: str) -> None:
    """Of three old tensors of 1 MiB two were followed: all three if both are in cycles, else the one that is."""
    old = [Storage(f"old{i}", 1 << 20, "temporary", shape="512x512") for i in range(3)]
    step = step_of([Op(reads=[one.key for one in old])], old, *usages)
    held = Holders.of(storage_id=step.storage_ids[:2], kind=kinds, tensors=[3, 3])
    found = named(step, 0, 10 << 20, held)
    assert [one.split(" at the peak")[0] for one in found] == ([size] if size else [])


VMAP = "/job/train.py:9:main"
WHOLE = f"/site-packages/torch/_functorch/vmap.py:507:_flat_vmap\n{VMAP}"


@pytest.mark.parametrize(
    ("stack", "frees", "out", "is_named"),
    [
        (WHOLE, ["copy"], 1 << 20, True),
        (
            f"/site-packages/torch/_functorch/eager_transforms.py:914:_chunked_standard_basis_for_\n{VMAP}",
            ["copy"],
            1 << 20,
            True,
        ),
        (WHOLE, [], 1 << 20, False),
        (WHOLE, ["copy"], 13 << 20, False),
        (
            WHOLE.replace("\n", "\n/site-packages/torch/_functorch/vmap.py:460:_chunked_vmap\n"),
            ["copy"],
            1 << 20,
            False,
        ),
        (VMAP, ["copy"], 1 << 20, False),
    ],
)
def test_a_vmap_of_the_whole_batch_is_named(stack: str, frees: list[str], out: int, *, is_named: bool) -> None:
    """4 MiB that backward in a vmap, or jacrev, makes and frees; not results, 4 of 17 MiB beside them, nor chunks."""
    ops = [
        Op(makes=["in"], stack=VMAP),
        Op(reads=["in"], makes=["basis"], stack=stack),
        Op(phase="backward", reads=["basis"], makes=["copy"], forward=0),
        Op(phase="backward", reads=["copy"], makes=["out"], frees=frees, forward=0),
        Op(reads=["out"], stack=VMAP),
    ]
    step = step_of(ops, [Storage("in", 1024), Storage("basis", 0), Storage("copy", 4 << 20), Storage("out", out)])
    found = named(step, 3, 6 << 20)
    assert len(found) == is_named
    assert not is_named or found[0].startswith("4.00 MiB at the peak are held only while a vmap at train.py:9 runs")


@pytest.mark.parametrize(
    ("kind", "category", "is_named"),
    [
        ("DistributedDataParallel", "collective", True),
        ("DistributedDataParallel", "gradient", False),
        ("FullyShardedDataParallel", "collective", False),
    ],
)
def test_gradients_beside_buckets_are_named(kind: str, category: str, *, is_named: bool) -> None:
    """A gradient of 2 MiB that is copied to a bucket, and one that lies in it."""
    ops = [Op(phase="backward", makes=["g"]), Op("aten.mul.out", "backward", reads=["g"], mutates=["bucket"])]
    step = step_of(ops, [Storage("bucket", 3 << 20, category), Storage("g", 2 << 20, "gradient")], kind=kind)
    found = named(step, 1, 5 << 20)
    assert [one.split(" lie")[0] for one in found] == (["2.00 MiB of gradients"] if is_named else [])


@pytest.mark.parametrize(
    ("category", "is_hooked", "is_named"),
    [("parameter", True, True), ("activation", True, False), ("parameter", False, False)],
)
def test_weights_that_hooks_move_are_named(category: str, *, is_hooked: bool, is_named: bool) -> None:
    """A weight of 4 MiB that hooks copy to the host; activations, and copies without hooks, are none."""
    ops = [Op("aten.empty.memory_format", makes=["host"]), Op("aten.copy_.default", reads=["w"], mutates=["host"])]
    step = step_of(ops, [Storage("w", 4 << 20, category), Storage("host", 0, requested=4 << 20)])
    device = np.where(step.storages.category == category, "cuda:0", "cpu").astype(object)
    device[step.storages.requested_bytes * (step.storages.allocated_bytes == 0) > 0] = "cpu"
    step = replace(step, storages=step.storages.replace(device=device))
    step = replace(step, ops=step.ops.replace(is_hooked=np.array([is_hooked] * 2)))
    found = named(step, 1, 8 << 20)
    assert [one.split(" go to")[0] for one in found] == (["4.00 MiB of 1 weight"] if is_named else [])


@pytest.mark.parametrize(
    ("usage", "saver", "is_named"),
    [
        (f"{IDLE_CHECKPOINTS} 1", "layer", True),
        (f"{IDLE_CHECKPOINTS} 0", "layer", True),
        (f"{IDLE_CHECKPOINTS} 1", "", False),
        ("", "layer", False),
    ],
)
def test_idle_checkpoints_are_named_with_what_they_keep(usage: str, saver: str, *, is_named: bool) -> None:
    """2 MiB that a layer saves, whose checkpointing, or its model's, is idle; not what another module saves."""
    ops = [Op(makes=["a"], saves=["a"], module=saver), Op(phase="backward", reads=["a"], forward=0, module=saver)]
    found = named(step_of(ops, [Storage("a", 2 << 20)], usage), 0, 4 << 20)
    assert [one.split(" are")[0] for one in found] == (["2.00 MiB at the peak"] if is_named else [])


class Layer(torch.nn.Module):
    """A layer of a library that checkpoints itself in training mode."""

    def __init__(self) -> None:
        """Switches its checkpointing on."""
        super().__init__()
        self.gradient_checkpointing = True
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.head = torch.nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize(("is_training", "is_whole"), [(True, True), (False, True), (True, False)])
def test_what_is_set_up_and_not_used_is_noted(tmp_path: Path, *, is_training: bool, is_whole: bool) -> None:
    """Checkpointing in eval mode, and 256 B of parameters without a gradient; a sound job has no note."""
    model = Layer().train(is_training)
    model.weight.grad = torch.zeros(64)
    model.head.grad = torch.zeros(64) if is_whole else None
    registry, usages = ModuleRegistry(RawLog(SpoolWriter(tmp_path))), Usages()
    registry.number(model)
    unused = Unused(registry, usages)
    unused.before_update(torch.optim.SGD(model.parameters(), 0.1))
    notes = unused.notes()
    assert len(notes) == (not is_whole)
    assert is_whole or notes[0].startswith("1 parameter of an optimizer (256 B) got no gradient")
    assert modules_in(usages.seen, IDLE_CHECKPOINTS) == ({0} if not is_training else set())


@pytest.mark.parametrize("is_updated", [False, True])
def test_gradients_that_no_update_uses_are_noted(tmp_path: Path, *, is_updated: bool) -> None:
    """A teacher of two parameters called without no_grad: 512 B of gradients. With an optimizer of its own, no note."""
    teacher, student = Layer(), torch.nn.Linear(4, 4)
    registry = ModuleRegistry(RawLog(SpoolWriter(tmp_path)))
    registry.number(teacher), registry.number(student)
    unused = Unused(registry, Usages())
    for one in (*teacher.parameters(), *student.parameters()):
        one.grad = torch.zeros_like(one)
    for model in (student, teacher)[: 1 + is_updated]:
        unused.before_update(torch.optim.SGD(model.parameters(), 0.1))
    assert [note[:36] for note in unused.notes()] == ["gradients of 2 parameters (512 B) are"[:36]] * (not is_updated)
