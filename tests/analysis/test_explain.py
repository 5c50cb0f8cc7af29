"""Causes of a change, each on a small job written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from memprof.analysis.diff.comparison import compare
from memprof.analysis.diff.explain import Cause, explain, modules_of
from memprof.analysis.diff.summary import Summary, summarise
from memprof.trace.manifest import Machine, Manifest
from tests.building import Module, Op, Storage, make_trace

KIB = 1024
STACK = "/job/train.py:{line}:main"


@dataclass(frozen=True)
class Net:
    """A job of a few layers that trains three steps; every field is a change that a job can have.

    Attributes:
        layers: Number of layers.
        width: Columns of every weight; a layer's weight is 64 x width, its output 8 x width.
        batch: Shape of the input.
        dtype: Element type of what forward makes.
        states: Keys of the optimizer's state.
        again: Layers recomputed in backward, instead of keeping their output.
        left: Bytes that each step adds to a list.
        holds_graph: What backward has read stays alive until the next step.
        evaluates: Whether the model is called once more, with "graph" or "none".
        holds: Layers whose outputs a variable references until the next step.
        keeps_gradients: Gradients stay until they are replaced.
        pieces: Chunks in which the loss is computed.
        rounds: Micro-batches.
        activation: Type of the module behind each layer.
        extra: Additional bytes that the first layer allocates.
        frozen: Layers that are not trained, the first ones.
        average: An average of the weights is kept.
    """

    layers: int = 2
    width: int = 64
    batch: str = "8x64"
    dtype: str = "float32"
    states: tuple[str, ...] = ("exp_avg",)
    again: int = 0
    left: int = 0
    holds_graph: bool = False
    evaluates: str = ""
    holds: int = 0
    keeps_gradients: bool = False
    pieces: int = 1
    rounds: int = 1
    activation: str = "ReLU"
    extra: int = 0
    frozen: int = 0
    average: bool = False

    def summary(self, **manifest: Any) -> Summary:
        """Sums its recording up."""
        steps = [self._step(number) for number in range(3)]
        trace = make_trace(steps, self._storages(), self._modules(), manifest=Manifest(target="train.py", **manifest))
        return summarise(trace)

    def _modules(self) -> list[Module]:
        layers = [Module(f"layers.{layer}", "Layer", 256 * self.width) for layer in range(self.layers)]
        return [
            Module("", "Net"),
            *layers,
            *[Module(f"layers.{layer}.activation", self.activation) for layer in range(self.layers)],
        ]

    def _storages(self) -> list[Storage]:
        made = 32 * self.width * (1 if self.dtype == "float32" else 0.5)
        found = [Storage("x", 2 * KIB, "input", shape=self.batch)]
        for layer in range(self.layers):
            name, module = f"layers.{layer}.weight", f"layers.{layer}"
            weight = 256 * self.width
            found.append(Storage(f"w{layer}", weight, "parameter", name, module, shape=f"64x{self.width}"))
            found += [
                Storage(f"{key}{layer}", weight, "optimizer_state", f"{name}.{key}", module) for key in self.states
            ]
            if layer >= self.frozen:
                found.append(Storage(f"g{layer}", weight, "gradient", name, module))
            if self.average:
                found.append(Storage(f"average{layer}", weight, "input", shape=f"64x{self.width}"))
            size = int(made) + (self.extra if not layer else 0)
            copies = "a" + ("r" if layer < self.again else "") + ("e" if self.evaluates else "")
            for copy in copies:
                found.append(Storage(f"{copy}{layer}", size, module=module, dtype=self.dtype))
        found += [Storage(f"left{number}", self.left, "temporary") for number in range(3)]
        whole = 48 * KIB // self.pieces
        found += [Storage(f"p{piece}", whole, "temporary") for piece in range(self.pieces)]
        return found

    def _step(self, number: int) -> list[Op]:
        ops: list[Op] = []
        stays = [f"a{layer}" for layer in range(self.layers) if self.holds_graph or layer < self.holds]
        if number and stays:
            ops.append(Op("aten.detach.default", "other", frees=stays))
        for round_number in range(self.rounds):
            self._round(ops, number, round_number, stays)
        gradients = [f"g{layer}" for layer in range(self.frozen, self.layers)]
        freed = [] if self.keeps_gradients else gradients
        weights = [f"w{layer}" for layer in range(self.layers)]
        states = [f"{key}{layer}" for key in self.states for layer in range(self.layers)]
        ops.append(Op("aten.add_.Tensor", "optimizer", reads=gradients, mutates=[*weights, *states], frees=freed))
        if self.evaluates:
            phase = "forward" if self.evaluates == "graph" else "other"
            made = [f"e{layer}" for layer in range(self.layers)]
            kept = made if self.evaluates == "graph" else []
            if number and kept:
                ops.append(Op("aten.detach.default", "other", frees=kept))
            ops += [
                Op(
                    "aten.mm.default",
                    phase,
                    f"layers.{layer}",
                    makes=[key],
                    reads=["x"],
                    frees=[] if kept else [key],
                )
                for layer, key in enumerate(made)
            ]
        return ops

    def _round(self, ops: list[Op], number: int, round_number: int, stays: Sequence[str]) -> None:
        common: dict[str, Any] = {"micro_batch": round_number, "stack": STACK.format(line=10)}
        first = len(ops)
        for layer in range(self.layers):
            key, is_again = f"a{layer}", layer < self.again
            ops.append(
                Op(
                    "aten.mm.default",
                    module=f"layers.{layer}",
                    makes=[key],
                    reads=["x", f"w{layer}"],
                    saves=[] if is_again else [key],
                    frees=[key] if is_again else [],
                    **common,
                )
            )
        if self.left and not round_number:
            ops.append(Op("aten.clone.default", makes=[f"left{number}"], stack=STACK.format(line=20)))
        pieces = [f"p{piece}" for piece in range(self.pieces)]
        ops += [Op("aten._log_softmax.default", makes=[piece], frees=[piece], **common) for piece in pieces]
        for layer in reversed(range(self.layers)):
            key = f"a{layer}"
            if layer < self.again:
                key = f"r{layer}"
                ops.append(
                    Op(
                        "aten.mm.default",
                        "backward",
                        f"layers.{layer}",
                        makes=[key],
                        reads=["x"],
                        is_recompute=True,
                        **common,
                    )
                )
            gradient = [f"g{layer}"] if layer >= self.frozen else []
            is_there = (self.keeps_gradients and number) or round_number
            ops.append(
                Op(
                    "aten.mm_backward.default",
                    "backward",
                    f"layers.{layer}",
                    makes=gradient if not is_there else [],
                    mutates=gradient if is_there else [],
                    reads=[key],
                    frees=[] if key in stays and round_number == self.rounds - 1 else [key],
                    forward=first + layer,
                    **common,
                )
            )


NET = Net()


def causes(base: Summary, head: Summary) -> tuple[Cause, ...]:
    return explain(compare([base], [head]))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"layers": 3}, "parameters", "layers.*.weight is 3 x 64x64 (was 2 x 64x64)"),
        ({"width": 96}, "parameters", "layers.*.weight is 2 x 64x96 (was 2 x 64x64)"),
        ({"batch": "16x64"}, "batch", "batch differs: 8x64 in the base, 16x64 now"),
        ({"rounds": 2}, "micro-batches", "micro-batches differs: 1 in the base, 2 now"),
        ({"rounds": 2, "batch": "4x64"}, "micro-batches", "micro-batches differs"),
        ({"dtype": "bfloat16"}, "dtype", "activation memory is 100% bfloat16 (was 0%)"),
        ({"states": ("exp_avg", "exp_avg_sq")}, "optimizer", "keeps exp_avg, exp_avg_sq instead of exp_avg"),
        ({"states": ()}, "optimizer", "the optimizer keeps nothing instead of exp_avg: -32.00 KiB of state"),
        ({"again": 2}, "checkpoint", "more recompute in backward: 0 operators in the base, 2 now"),
        ({"left": 4 * KIB}, "leak", "memory grows by 4.00 KiB per step"),
        ({"holds_graph": True}, "graph", "4.00 KiB already read by backward stay live until the next step"),
        ({"evaluates": "graph"}, "no-grad", "outside torch.no_grad()"),
        ({"keeps_gradients": True}, "gradient", "gradients of the previous step are still live in forward"),
        ({"layers": 4, "frozen": 3}, "parameters", "changed by +32.00 KiB"),
        ({"frozen": 1}, "gradient", "fewer gradients are live at once, 16.00 KiB (was 32.00 KiB)"),
        ({"average": True}, "held", "2 more, 32.00 KiB (shapes such as 64x64)"),
        ({"activation": "GELU", "extra": KIB}, "modules", "2 GELU (was 0)"),
        ({"extra": KIB}, "activation", "+1.00 KiB of activation memory in forward, +1.00 KiB in layers.0"),
    ],
)
def test_each_cause_is_named_first(change: dict[str, Any], kind: str, words: str) -> None:
    """The explanation matches the planted change, and names its place or its figures."""
    first = causes(NET.summary(), dataclasses.replace(NET, **change).summary())[0]
    assert first.kind == kind
    assert words in first.sentence


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"layers": 3}, "parameters", "changed by -16.00 KiB"),
        ({"again": 2}, "checkpoint", "less recompute in backward: 2 operators in the base, 0 now"),
        ({"left": 4 * KIB}, "leak", "memory no longer grows by 4.00 KiB per step"),
        ({"holds_graph": True}, "graph", "no longer stay live until the next step"),
        ({"evaluates": "graph"}, "no-grad", "no longer saved for a backward that never runs"),
        ({"keeps_gradients": True}, "gradient", "are freed before forward starts"),
        ({"frozen": 1}, "gradient", "more gradients are live at once"),
        ({"average": True}, "held", "2 fewer"),
        ({"extra": KIB}, "activation", "-1.00 KiB of activation memory"),
    ],
)
def test_what_is_taken_back_is_named_too(change: dict[str, Any], kind: str, words: str) -> None:
    """A fix is explained like the regression it reverts."""
    first = causes(dataclasses.replace(NET, **change).summary(), NET.summary())[0]
    assert first.kind == kind
    assert words in first.sentence


def test_what_is_set_from_outside_comes_first() -> None:
    """The allocator's settings and the plan are listed before their possible effects."""
    wider = dataclasses.replace(NET, width=96)
    settings = Machine(allocator_settings="expandable_segments:True")
    first, second, *_ = causes(NET.summary(), wider.summary(machine=settings))
    assert (first.kind, second.kind) == ("allocator-settings", "parameters")
    assert first.sentence == "allocator settings differs: none in the base, expandable_segments:True now"
    planned = dataclasses.replace(wider.summary(), plan="checkpoint layers.*")
    assert [cause.kind for cause in causes(NET.summary(), planned)][:2] == ["plan", "parameters"]


def test_a_leak_of_numbers_is_told_last() -> None:
    """A growth of a few bytes per step is listed after the largest change, and alone if nothing else changed."""
    leaking = dataclasses.replace(NET, left=4)
    (only,) = [cause for cause in causes(NET.summary(), leaking.summary()) if cause.kind != "temporary"]
    assert only.kind == "leak"
    assert "train.py:20" in only.sentence
    found = causes(NET.summary(), dataclasses.replace(leaking, width=96).summary())
    assert found[0].kind == "parameters"
    assert found[-1].kind == "leak"


def test_more_layers_that_all_run_again_are_parameters() -> None:
    """More is run again because there is more; whether layers are checkpointed did not change."""
    base, head = (dataclasses.replace(NET, layers=layers, again=layers).summary() for layers in (4, 6))
    found = [cause.kind for cause in causes(base, head)]
    assert found[0] == "parameters"
    assert "checkpoint" not in found
    fewer = dataclasses.replace(NET, layers=4, again=3).summary()
    assert causes(base, fewer)[0].kind == "checkpoint"


def test_larger_outputs_that_are_held_are_no_kept_graph() -> None:
    """An output held in both is not the cause where it only grew with the layer."""
    base, head = (dataclasses.replace(NET, holds=1, width=width, layers=8).summary() for width in (64, 96))
    assert [cause.kind for cause in causes(base, head) if cause.kind in ("graph", "held", "no-grad")] == []


def test_an_output_that_a_name_holds_is_told_with_its_line() -> None:
    """A single tensor held across steps is not reported as a kept graph, but with its line."""
    base = dataclasses.replace(NET, layers=8)
    first = causes(base.summary(), dataclasses.replace(base, holds=1).summary())[0]
    assert first.kind == "held"
    assert first.sentence == (
        "forward tensors still referenced when the step ends: 1 more, 2.00 KiB (allocated at train.py:10)"
    )


def test_what_is_held_of_a_larger_change_is_told_behind_it() -> None:
    """The first cause is the one that most of the change comes from."""
    base = dataclasses.replace(NET, layers=8, pieces=4)
    found = [cause.kind for cause in causes(base.summary(), dataclasses.replace(base, holds=1, pieces=1).summary())]
    assert found == ["pieces", "temporary", "held"]


def test_a_leak_is_told_with_the_line_that_leaves_it_behind() -> None:
    """A line that moved, and whose tensor is replaced by each step, is not taken for it."""

    def of(first_line: int, *, is_leaking: bool) -> Summary:
        steps = []
        for number in range(3):
            ops = [Op("aten.mm.default", makes=["loss"], stack=STACK.format(line=first_line), frees=[])]
            if number:
                ops.insert(0, Op("aten.detach.default", "other", frees=["loss"]))
            if is_leaking:
                ops.append(Op("aten.clone.default", makes=[f"left{number}"], stack=STACK.format(line=first_line + 1)))
            steps.append(ops)
        left = [Storage(f"left{number}", 2 * KIB, "temporary") for number in range(3)] if is_leaking else []
        return summarise(make_trace(steps, [Storage("loss", 4 * KIB, "temporary"), *left]))

    first = causes(of(10, is_leaking=False), of(12, is_leaking=True))[0]
    assert first.kind == "leak"
    assert first.sentence.endswith("(allocated at train.py:13)")
    gone = causes(of(10, is_leaking=True), of(12, is_leaking=False))[0]
    assert gone.sentence == "memory no longer grows by 2.00 KiB per step, as it did (allocated at train.py:11)"


def test_types_are_compared_where_a_category_holds_most() -> None:
    """A peak that moves to a moment with only full-precision outputs is not reported as a change of types."""

    def of(workspace: int) -> Summary:
        ops = [
            Op("aten.mm.default", makes=["hidden"], frees=[]),
            Op("aten._to_copy.default", makes=["output"], reads=["hidden"]),
            Op("aten.mm_backward.default", "backward", reads=["hidden"], frees=["hidden"]),
            Op("aten._foreach_add_.List", "optimizer", workspace=workspace),
        ]
        return summarise(make_trace([ops], [Storage("hidden", 4000, dtype="bfloat16"), Storage("output", 80)]))

    base, head = of(0), of(9000)
    assert (base.peak.phase, head.peak.phase) == ("forward", "optimizer")
    (only,) = causes(base, head)
    assert only.kind == "workspace"


def test_evaluation_without_gradients_is_no_fault() -> None:
    """Results that no backward follows on are fine where nothing is kept for one."""
    found = causes(NET.summary(), dataclasses.replace(NET, evaluates="none").summary())
    assert "no-grad" not in [cause.kind for cause in found]


def test_a_loss_in_one_piece_is_told_by_its_operator() -> None:
    """What was done in four pieces is done at once: the operator runs once where it ran four times."""
    found = causes(dataclasses.replace(NET, pieces=4).summary(), NET.summary())
    assert found[0].kind == "pieces"
    assert "aten._log_softmax.default runs on fewer, larger pieces (4 calls in the base, 1 now)" in found[0].sentence


def test_modules_named_hold_nine_tenths_of_the_change() -> None:
    """The fewest that do, the largest first."""
    base, head = NET.summary(), dataclasses.replace(NET, extra=KIB).summary()
    assert [(one.name, one.bytes) for one in modules_of(compare([base], [head]))] == [("layers.0", KIB)]
