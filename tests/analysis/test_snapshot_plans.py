"""What would lower the peak of a snapshot written by hand, whose every byte under each change is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.snapshot_plans.change import Change, PlannedStep, step_to_plan
from memprof.analysis.snapshot_plans.change_search import search_snapshot
from memprof.analysis.snapshot_plans.layers import checkpoint_change, find_layers
from memprof.analysis.snapshot_plans.sizes import size_changes
from memprof.analysis.snapshot_plans.updates import update_changes
from memprof.cli.main import main
from memprof.errors import InconclusiveError, PolicyError
from memprof.replay.live import live_bytes
from memprof.trace.importers.importing import import_file
from memprof.trace.step import Step
from memprof.trace.store import Trace, write_trace
from memprof.units import format_bytes
from tests.trace.importers.test_called_modules import stack
from tests.trace.importers.writing import (
    BACKWARD,
    MIB,
    OPTIMIZER,
    TRAIN,
    block,
    entry,
    frame,
    freed,
    segment,
    snapshot,
    write,
)

UPDATE = OPTIMIZER[1:]  # without the frame that sets up state
LAYERS = 3


class Job:
    """Writes the history of a training step; addresses are never used twice."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.alive: dict[int, int] = {}
        self._next = 0

    def alloc(self, mib: int, frames: Any, *, is_before: bool = False) -> int:
        """Allocates some MiB; what was there before the history is in the end state alone."""
        address, self._next = self._next, self._next + mib * MIB
        self.alive[address] = mib * MIB
        if not is_before:
            self.history.append(entry("alloc", address, mib * MIB, frames))
        return address

    def free(self, address: int) -> None:
        """Frees an allocation."""
        self.history += freed(address, self.alive.pop(address))

    def content(self) -> dict[str, Any]:
        """The snapshot."""
        return snapshot([segment(address, block(size)) for address, size in self.alive.items()], self.history)


def training() -> dict[str, Any]:
    """Layers with a weight of 2 MiB and Adam's state of 4, which save 5 MiB and return 1; logits of 12 MiB."""
    job = Job()
    for _ in range(LAYERS):
        job.alloc(2, None, is_before=True)
    for _ in range(2 * LAYERS):
        job.alloc(2, None, is_before=True)
    saved, outputs = [], []
    for _ in range(LAYERS):
        saved.append(job.alloc(5, stack("/job/net.py:20", "/job/layer.py:3")))
        outputs.append(job.alloc(1, stack("/job/net.py:20", "/job/layer.py:4")))
    logits = job.alloc(12, stack("/job/net.py:21", "/env/site-packages/torch/nn/modules/linear.py:134"))
    logs = job.alloc(12, TRAIN)
    gradient = job.alloc(12, BACKWARD)  # the peak: 18 + 3 * 6 + 36
    job.free(logits)
    job.free(logs)
    down = job.alloc(1, BACKWARD)
    job.free(gradient)
    weights = []
    for layer in reversed(range(LAYERS)):
        weights.append(job.alloc(2, BACKWARD))
        up = job.alloc(1, BACKWARD)
        job.free(saved[layer])
        job.free(outputs[layer])
        job.free(down)
        down = up
    job.free(down)
    temporaries = [job.alloc(2, UPDATE) for _ in weights]
    for address in [*temporaries, *weights]:
        job.free(address)
    return job.content()


def imported(folder: Path, job: Job | dict[str, Any]) -> Trace:
    """Imports a snapshot into a folder."""
    folder.mkdir(exist_ok=True)
    content = job.content() if isinstance(job, Job) else job
    write_trace(folder / "run.memprof", import_file(write(folder / "s.pickle", content)).ranks)
    return Trace.open(folder / "run.memprof")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The imported snapshot."""
    return Path(imported(tmp_path_factory.mktemp("snapshot"), training()).path)


@pytest.fixture(scope="module")
def step(recording: Path) -> Step:
    """Its step."""
    return Trace.open(recording).fullest_step()


def peak_under(step: Step, *changes: Change) -> float:
    """The peak in MiB."""
    for change in changes:
        step = change.transform(step)
        step.check()
    return int(live_bytes(step).during.max()) / MIB


def named(what: str) -> Change:
    """The change of a name."""
    (found,) = [change for change in (*update_changes(4), *size_changes()) if what in change.what]
    return found


def test_the_snapshot_is_read_as_it_was_written(step: Step) -> None:
    """The peak is where the gradient of the logits is made."""
    assert peak_under(step) == 18 + LAYERS * 6 + 3 * 12
    assert {str(one) for one in step.storages.category} >= {"parameter", "optimizer_state", "activation", "gradient"}


def _peaking_in_update(file: str) -> Job:
    """Two weights of 4 MiB with Adam's states, and an update that takes the roots of all squares at once."""
    job, update = Job(), [frame(f"/env/site-packages/torch/optim/{file}.py:588", "_multi_tensor"), *TRAIN]
    root = frame("??:0", "at::_ops::_foreach_sqrt::call(c10::ArrayRef<at::Tensor>)")
    for _ in range(2 + 2 * 2):
        job.alloc(4, None, is_before=True)
    gradients = []
    for _ in range(2):
        kept = job.alloc(1, stack("/job/net.py:20"))
        gradients.append(job.alloc(4, BACKWARD))
        job.free(kept)
    for address in [*(job.alloc(4, [root, *update]) for _ in gradients), *gradients]:
        job.free(address)
    return job


def test_the_fused_optimizer_is_proposed_where_the_peak_is_in_its_temporaries(tmp_path: Path) -> None:
    """24 MiB of weights and state, 8 of gradients, and 8 of roots, which a fused kernel does not need.

    The peak is then in backward, with an activation of 1 MiB. On the device, the kernel keeps a step counter for each
    parameter, of a block of 512 bytes. NAdam has no such kernel.
    """
    trace = imported(tmp_path / "adamw", _peaking_in_update("adamw"))
    step = trace.fullest_step()
    assert step.ops.name[int(live_bytes(step).during.argmax())] == "aten._foreach_sqrt"
    assert peak_under(step) == 24 + 8 + 8
    assert peak_under(step, named("fused")) == 24 + 8 + 1 + 2 * 512 / MIB
    found = search_snapshot(trace, step_to_plan(trace), 35 * MIB)
    assert "fused update" in [plan.what for plan in found.fitting]
    other = imported(tmp_path / "nadam", _peaking_in_update("nadam"))
    with pytest.raises(PolicyError, match="no fused form of its nadam"):
        named("fused").transform(other.fullest_step())


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("in host memory", 72 - 12),  # all state but one parameter's, which is there in the update alone
        ("8-bit", 72 - 12 + 6 * (2 * (1 / 4 + 1 / 64 / 4) + 1 / 1024)),
        ("sharded over 4", 72 - 12 * 3 / 4),
        ("in 8 chunks", 18 + 18 + 3 * 12 / 8),
        ("micro-batches", 18 + 6 + (18 + 36) / 2),  # all gradients are there from the first one on
        # A copy of the weights; half the logits and half their softmax, which the loss copies to float32.
        ("bf16", 18 + 3 + 18 / 2 + 6 + 6 + 12 + 12),
    ],
)
def test_a_change_is_replayed(step: Step, what: str, expected: float) -> None:
    """The peak under each change is the one worked out by hand."""
    assert peak_under(step, named(what)) == pytest.approx(expected, abs=0.001)


def test_checkpointing_layers_frees_what_they_save_and_makes_it_again(step: Step) -> None:
    """With the loss in chunks, the peak is in the layers: one is there again, of the others the outputs."""
    (layers,) = find_layers(step)
    assert (layers.kind, len(layers.modules), layers.saved_bytes) == ("layer.py:3 forward", LAYERS, LAYERS * 5 * MIB)
    every = checkpoint_change(layers, LAYERS)
    assert peak_under(step, every) == 72 - LAYERS * 5
    # The last layer of backward: weights and state, an output, its own 5, gradients of 6 and two of 1 on the way.
    assert peak_under(step, named("in 8 chunks"), every) == 18 + 1 + 5 + 6 + 1 + 1
    # One layer that is not checkpointed keeps its 5.
    assert peak_under(step, checkpoint_change(layers, LAYERS - 1)) == 72 - (LAYERS - 1) * 5


@pytest.mark.parametrize("in_backward", [False, True])
def test_layers_are_checkpointed_where_memory_runs_out_before_backward_reaches_them(
    tmp_path: Path, in_backward: bool
) -> None:
    """What their calls keep goes at their ends; all of them are proposed, since the rest of the step is unknown."""
    job = Job()
    given = job.alloc(1, TRAIN)
    for _ in range(LAYERS):
        job.alloc(5, stack("/job/net.py:20", "/job/layer.py:3"))
        output = job.alloc(1, stack("/job/net.py:20", "/job/layer.py:4"))
        job.free(given)
        given = output
    if in_backward:
        job.alloc(2, BACKWARD)
    frames = BACKWARD if in_backward else TRAIN
    job.history.append({"action": "oom", "device_free": MIB, "size": 4 * MIB, "stream": 0, "frames": frames})
    trace = imported(tmp_path, job)
    planned = step_to_plan(trace)
    (layers,) = find_layers(planned.step)
    assert layers.saved_bytes == LAYERS * 5 * MIB
    before = peak_under(planned.step)
    assert before == LAYERS * 5 + 1 + (2 + 4 if in_backward else 4)
    # The inputs stay for recomputing: with the output, one more than layers. In the last layer its own 5 are there.
    every = checkpoint_change(layers, LAYERS)
    assert peak_under(planned.step, every) == max(1 + LAYERS + (2 + 4 if in_backward else 4), 1 + LAYERS + 5)
    found = search_snapshot(trace, planned, int(before * MIB) - 1, allow=["checkpoint"])
    assert [plan.what for plan in found.fitting] == ["checkpoint all 3 layer.py:3 forward"]


def test_an_update_in_backward_frees_each_gradient(step: Step) -> None:
    """With layers and loss out of the way, all gradients together are the peak, or one of them with its temporary."""
    (layers,) = find_layers(step)
    before = [named("in 8 chunks"), checkpoint_change(layers, LAYERS)]
    smaller = [*before, named("in host memory")]
    assert peak_under(step, *smaller) == 6 + 4 + 3 * 2 + 3 * 2  # the update: weights, one state, gradients, temporaries
    # The first layer of backward: weights, outputs, its own 5, a gradient and what its update takes, two of 1.
    assert peak_under(step, named("update in backward"), *smaller) == 6 + 3 + 5 + 2 + 2 + 1 + 1


def test_a_search_finds_the_cheapest_changes_that_fit(recording: Path, step: Step) -> None:
    """No plan contains another, as few layers as possible are checkpointed, and each peak is within budget."""
    budget = 62 * MIB
    found = search_snapshot(Trace.open(recording), PlannedStep(step), budget)
    assert [plan.what for plan in found.fitting][:3] == [
        "head and loss in 8 chunks",
        "optimizer state in host memory",
        "checkpoint all 3 layer.py:3 forward",
    ]
    assert all(plan.bounds[1] <= budget for plan in found.fitting)
    assert all(plan.peak_bytes == live_bytes(plan.step).during.max() for plan in found.fitting)
    sets = [{change.what for change in plan.changes} for plan in found.fitting]
    assert not any(one < other for one in sets for other in sets)
    fewer = search_snapshot(Trace.open(recording), PlannedStep(step), 71 * MIB + MIB // 2, allow=["checkpoint"])
    assert [plan.what for plan in fewer.fitting] == ["checkpoint 1 of 3 layer.py:3 forward"]


def test_the_budget_it_would_need_covers_reserved_bytes(recording: Path, step: Step) -> None:
    """Where reserved bytes must fit, the smallest budget that is named is enough for them, and a byte less is not."""
    trace, planned = Trace.open(recording), PlannedStep(step)
    needed = search_snapshot(trace, planned, MIB, allow=["loss"], counts_reserved=True).needed_bytes
    assert search_snapshot(trace, planned, needed, allow=["loss"], counts_reserved=True).fitting
    assert not search_snapshot(trace, planned, needed - 1, allow=["loss"], counts_reserved=True).fitting


def test_the_page_says_what_is_approximate_and_what_it_would_need(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows plans, how each is had, what is not possible and why; the exit code is that of every search."""
    assert main(["suggest", str(recording), "--budget", "62MiB"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("Within 62.00 MiB: head and loss in 8 chunks")
    for words in ("approximate", "replayed", "rule", "record the job itself", "memprof record --dry-run"):
        assert words in page
    assert "DataLoader" not in page
    assert main(["suggest", str(recording), "--budget", "5MiB", "--json"]) == 4
    said = json.loads(capsys.readouterr().out)
    assert (said["is_approximate"], said["recorded"]["peak_allocated_bytes"]) == (True, 72 * MIB)
    assert {plan["fits"] for plan in said["plans"]} == {False}
    assert said["minimum_feasible_bytes"] <= min(plan["peak_interval_bytes"][1] for plan in said["plans"])
    assert main(["suggest", str(recording), "--budget", str(said["minimum_feasible_bytes"])]) == 0
    capsys.readouterr()
    assert main(["suggest", str(recording), "--budget", "80MiB"]) == 0
    assert "already fits" in capsys.readouterr().out
    assert main(["suggest", str(recording), "--budget", "62MiB", "--explain", "1"]) == 2
    assert "no operators" in capsys.readouterr().err


def test_the_page_shows_every_fact_of_a_plan(
    recording: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of plans over budget: peaks without the error range, sources, numerics; and every refused change."""
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["suggest", str(recording), "--budget", "62MiB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["suggest", str(recording), "--budget", "62MiB"]) == 0
    page = capsys.readouterr().out
    for plan in said["plans"]:
        line = next(line for line in page.splitlines() if re.match(rf"(\d  )?{re.escape(plan['describe'])} ", line))
        least, most = plan["peak_interval_bytes"]
        exact = format_bytes(plan["peak_allocated_bytes"])
        numerics = "bit-identical" if plan["numerics"] == "none" else plan["numerics"]
        for fact in (exact if least < most else "", plan["peak_phase"], plan["how"], numerics):
            assert fact in line
        assert not plan["fits"] or format_bytes(plan["saved_bytes"]) in line
    for refused in said["refused"]:
        assert f"\n{refused['plan']} " in page


def test_a_forward_alone_says_that_it_shows_no_backward(tmp_path: Path) -> None:
    """Changes of backward and the update are refused with the reason that applies."""
    job = Job()
    job.alloc(2, None, is_before=True)
    for _ in range(2):
        for line in (3, 4):
            job.free(job.alloc(5, stack("/job/net.py:20", f"/job/layer.py:{line}")))
    trace = imported(tmp_path, job)
    found = search_snapshot(trace, step_to_plan(trace), MIB)
    reasons = dict(found.refused)
    assert reasons["update in backward"] == "the step shows no backward with an update after it."
    assert reasons["checkpoint layers"].startswith("no module of the stacks is called several times in turn")


def test_a_request_that_failed_counts_as_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that ran out of memory needs at least what it had and what it asked for."""
    job = Job()
    for _ in range(2):
        job.free(job.alloc(1, stack("/job/net.py:20", "/job/layer.py:2")))
        job.alloc(5, stack("/job/net.py:20", "/job/layer.py:3"))
    content = job.content()
    content["device_traces"][0].append(
        {"action": "oom", "device_free": MIB, "size": 4 * MIB, "stream": 0, "frames": TRAIN}
    )
    planned = step_to_plan(imported(tmp_path, content))
    assert peak_under(planned.step) == 10 + 4
    assert main(["suggest", str(tmp_path / "run.memprof"), "--budget", "13MiB"]) == 0
    page = capsys.readouterr().out
    assert "the request of 4.00 MiB that failed counts as made" in page
    assert page.startswith("Within 13.00 MiB: 2 micro-batches")


def test_an_end_state_cannot_be_replayed(tmp_path: Path) -> None:
    """What is in use at one moment has no order."""
    trace = imported(tmp_path, snapshot([segment(0, block(MIB))]))
    with pytest.raises(InconclusiveError, match="without a history"):
        search_snapshot(trace, step_to_plan(trace), MIB)


def test_layers_that_save_nothing_are_not_checkpointed(step: Step) -> None:
    """A second time there is nothing left to free."""
    (layers,) = find_layers(step)
    once = checkpoint_change(layers, LAYERS).transform(step)
    with pytest.raises(PolicyError, match="keep nothing"):
        checkpoint_change(layers, LAYERS).transform(once)


def test_an_update_in_backward_is_refused_where_all_gradients_are_needed(tmp_path: Path) -> None:
    """Clipping by the norm of all gradients, and gradients that are accumulated, leave them alive until the update."""
    clip = [frame("/env/site-packages/torch/nn/utils/clip_grad.py:90", "_get_total_norm"), *TRAIN]
    for more, reason in ((True, "clips or unscales"), (False, "accumulates")):
        job = Job()
        gradients = []
        for _ in range(1 if more else 2):
            saved = job.alloc(5, stack("/job/net.py:20", "/job/layer.py:3"))
            gradients.append(job.alloc(2, BACKWARD))
            job.free(saved)
        if more:
            job.free(job.alloc(1, clip))
        job.free(job.alloc(2, UPDATE))
        for address in gradients:
            job.free(address)
        trace = imported(tmp_path / f"{more}", job)
        with pytest.raises(PolicyError, match=reason):
            named("update in backward").transform(trace.fullest_step())


def test_a_layer_that_ends_with_a_norm_returns_the_norms_output(tmp_path: Path) -> None:
    """A norm makes its statistics behind its output, which is what the next layer keeps as its input."""
    job = Job()
    left = []
    for _ in range(2):
        left.append(job.alloc(5, stack("/job/net.py:20", "/job/layer.py:3")))
        norm = stack("/job/net.py:20", "/job/layer.py:4", "/env/site-packages/torch/nn/modules/normalization.py:9")
        left += [job.alloc(3, norm), job.alloc(1, norm)]
    for address in reversed(left):
        job.free(job.alloc(1, BACKWARD))
        job.free(address)
    (layers,) = find_layers(imported(tmp_path, job).fullest_step())
    assert layers.saved_bytes == 2 * (5 + 1) * MIB


def test_a_layer_that_keeps_a_copy_of_its_input_keeps_the_input_itself_when_checkpointed(tmp_path: Path) -> None:
    """A layer's output is freed in the next one's forward, which copies it: recomputing needs it until backward."""
    job = Job()
    given, copies = job.alloc(3, TRAIN), []
    for _ in range(3):
        copies.append(job.alloc(9, stack("/job/net.py:20", "/job/layer.py:3")))  # of the input
        output = job.alloc(3, stack("/job/net.py:20", "/job/layer.py:4"))
        job.free(given)
        given = output
    for copy in reversed(copies):
        job.free(job.alloc(1, BACKWARD))
        job.free(copy)
    job.free(given)
    step = imported(tmp_path, job).fullest_step()
    (layers,) = find_layers(step)
    assert layers.saved_bytes == 3 * 9 * MIB
    # Forward ends with the job's input and three outputs. Backward adds a copy of one layer's input, behind which
    # recomputing ends early, and 1 MiB of its own.
    assert peak_under(step, checkpoint_change(layers, 3)) == 4 * 3 + 9 + 1


@pytest.mark.parametrize("has_operators", [True, False])
def test_bf16_leaves_masks_of_dropout_and_softmax(tmp_path: Path, has_operators: bool) -> None:
    """By operators, or by torch's Python functions where C++ frames are missing."""

    def made_by(operator: str, function: str) -> list[dict[str, Any]]:
        python = [frame("/env/site-packages/torch/nn/functional.py:9", function), *stack("/job/net.py:20")]
        called = [frame("??:0", f"at::_ops::{operator}::call(at::Tensor const&)")]
        return [*called, *python] if has_operators else python

    job = Job()
    kept = [job.alloc(8, made_by("_softmax", "softmax"))]
    kept += [job.alloc(size, made_by("native_dropout", "dropout")) for size in (8, 2)]
    kept += [job.alloc(20, made_by("gelu", "gelu"))]
    for address in reversed(kept):
        job.free(job.alloc(1, BACKWARD))
        job.free(address)
    step = imported(tmp_path, job).fullest_step()
    assert peak_under(step) == 8 + 8 + 2 + 20 + 1
    assert peak_under(step, named("bf16")) == 8 + 4 + 2 + 10 + 1
