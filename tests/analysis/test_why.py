"""Known causes are said with their bytes where they hold, and not where they do not."""

from __future__ import annotations

import pytest
import torch

from memprof.analysis.report.sources import find_sources
from memprof.analysis.report.why import find_causes
from memprof.recorder.notes import Unused
from tests.building import Op, Storage, make_step

LINE = "/job/train.py:17:forward"


def causes(*, own: int, copied: int, product: str = "aten.bmm.default") -> tuple[str, ...]:
    """Returns the causes in a forward that expands, copies and multiplies a table."""
    ops = [
        Op("aten.expand.default", reads=["table"], stack=LINE),
        Op("aten.clone.default", reads=["table"], makes=["copy"], stack=LINE),
        Op(product, reads=["copy"], makes=["out"], stack=LINE),
    ]
    step = make_step(ops, [Storage("table", own, "parameter"), Storage("copy", copied), Storage("out", 1024)])
    return find_causes(step, find_sources(step.stacks), 2, own + copied + 1024)


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
    (sentence,) = find_causes(step, find_sources(step.stacks), 2, 9 << 20)
    assert sentence.startswith("2.00 MiB at the peak are copies of 2 weights in another type")


def test_weights_that_every_call_copies_anew_are_not_counted_twice() -> None:
    """Three calls that each copy the same 2 MiB in bfloat16 keep 3 MiB: autocast without its cache."""
    ops = [Op("aten._to_copy.default", reads=["w"], makes=[f"c{i}"]) for i in range(3)]
    storages = [Storage("w", 2 << 20, "parameter"), *(Storage(f"c{i}", 1 << 20, dtype="bfloat16") for i in range(3))]
    step = make_step(ops, storages)
    (sentence,) = find_causes(step, find_sources(step.stacks), 2, 5 << 20)
    assert sentence.startswith("3.00 MiB at the peak are 3 copies of 1 weight in another type")
    assert "unless cache_enabled is False" in sentence


class Layer(torch.nn.Module):
    """A layer of a library that checkpoints itself in training mode."""

    def __init__(self) -> None:
        """Switches its checkpointing on."""
        super().__init__()
        self.gradient_checkpointing = True
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.head = torch.nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize(("is_training", "is_whole"), [(True, True), (False, True), (True, False)])
def test_what_is_set_up_and_not_used_is_noted(*, is_training: bool, is_whole: bool) -> None:
    """Checkpointing in eval mode, and 256 B of parameters without a gradient; a sound job has no note."""
    model = Layer().train(is_training)
    model.weight.grad = torch.zeros(64)
    model.head.grad = torch.zeros(64) if is_whole else None
    unused = Unused(lambda: [model])
    unused.before_update(torch.optim.SGD(model.parameters(), 0.1))
    notes = unused.notes()
    assert len(notes) == (not is_training) + (not is_whole)
    assert is_training or "switched on in 1 module in eval mode" in notes[0]
    assert is_whole or notes[0].startswith("1 parameter of an optimizer (256 B) got no gradient")


@pytest.mark.parametrize("is_updated", [False, True])
def test_gradients_that_no_update_uses_are_noted(*, is_updated: bool) -> None:
    """A teacher of two parameters called without no_grad: 512 B of gradients. With an optimizer of its own, no note."""
    teacher, student = Layer(), torch.nn.Linear(4, 4)
    unused = Unused(lambda: [teacher, student])
    for one in (*teacher.parameters(), *student.parameters()):
        one.grad = torch.zeros_like(one)
    for model in (student, teacher)[: 1 + is_updated]:
        unused.before_update(torch.optim.SGD(model.parameters(), 0.1))
    assert [note[:36] for note in unused.notes()] == ["gradients of 2 parameters (512 B) are"[:36]] * (not is_updated)
