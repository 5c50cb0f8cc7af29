"""Accumulation: estimates lie within their bounds, and runs train as with the whole batch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memprof
from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.candidates import compares_samples, repeats_by_batch
from memprof.policies.accumulate.policy import IN_TURN, NOT_A_MEAN, WEIGHED, Accumulate
from memprof.policies.accumulate.round import ACTIVE
from memprof.policies.accumulate.split import micro_batches, split_batch, split_from_start
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import cell_of_body
from memprof.policies.swap.policy import Swap
from memprof.recorder.steps.batches import batch_size
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies import faces
from tests.policies.faces import peaks, record_step


@pytest.fixture(scope="module")
def recorded() -> dict[str, Step]:
    return {name: faces.recorded(name) for name in ("shared", "unet", "lstm")}


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, -3, 2.0, True, "4"])
def test_a_number_that_splits_nothing_is_refused(number: Any) -> None:
    """Invalid settings are refused at construction, with a valid example."""
    with pytest.raises(PolicyError, match="whole number of 2 or more"):
        Accumulate(micro_batches=number)


# -- prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "parts"), [("shared", 5), ("unet", 4), ("lstm", 2)])
def test_a_run_lies_within_the_bounds_of_the_estimate(recorded: dict[str, Step], job: str, parts: int) -> None:
    """Also with uneven parts; policies that change lifetimes are predicted on the estimate."""
    plan = Plan((Accumulate(parts),))
    predicted = plan.transform(recorded[job])
    predicted.check()
    bounds = interval_of(plan.policies, [recorded[job]], [predicted])
    assert bounds.least_bytes <= peaks(record_step(job, plan))[0] <= bounds.most_bytes
    assert peaks(predicted)[0] < 0.8 * peaks(recorded[job])[0]
    assert predicted.ops.flops.sum() == pytest.approx(recorded[job].ops.flops.sum(), rel=0.001 if parts != 5 else 0.3)
    for policy in (Checkpoint(modules=(".",)), Swap(modules=(".",), to="disk")):
        Plan((*plan.policies, policy)).transform(recorded[job]).check()


def test_the_batch_is_found(recorded: dict[str, Step]) -> None:
    """The batch size comes from the inputs; a BatchNorm's statistics do not grow, although 24 is a multiple of 8."""
    batch = find_batch(recorded["unet"])
    storages = recorded["unet"].storages
    assert batch.size == 8
    assert not batch.is_proportional[storages.shape == "24"].any()
    assert batch.is_proportional[(storages.shape == "8x24x16x16") & (storages.category == "activation")].all()
    assert find_batch(recorded["lstm"]).size == 12


LOSSES = {
    "contrastive": lambda a, b: nn.functional.cross_entropy(a @ b.t(), torch.arange(len(a))),
    "views": lambda a, b: (torch.cat([a, b]) @ torch.cat([a, b]).t()).logsumexp(1).mean(),
    "distances": lambda a, b: torch.cdist(a, b).relu().mean(),
    "classes": lambda a, b: nn.functional.cross_entropy(a, torch.zeros(len(a), dtype=torch.long)) + b.mean(),
    "attention": lambda a, b: (a.view(-1, 4, 6) @ b.view(-1, 6, 4)).softmax(-1).mean(),
}


@pytest.mark.parametrize(("loss", "compares"), [(name, name in list(LOSSES)[:3]) for name in LOSSES])
def test_losses_that_compare_samples_are_known(loss: str, compares: bool, tmp_path: Path) -> None:
    """A number for every two samples cannot be had from parts of the batch."""
    model = nn.Linear(6, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=1):
        for _ in range(3):
            optimizer.zero_grad()
            LOSSES[loss](model(torch.randn(30, 6)), model(torch.randn(30, 6))).backward()
            optimizer.step()
    assert compares_samples(Trace.open(tmp_path / "run.memprof").steady_step()) == compares


class Solver(nn.Module):
    """Applies a layer up to four times, and reads a number in between."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(6, 6), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            last, x = x, x + 0.1 * self.layer(x).tanh()
            error = (x - last).square().mean().sqrt()
            if self.reads == "error" and error < 1e-6:
                break
            if self.reads == "size" and error.item() < 1e-6:
                break
            if self.reads == "any" and not torch.isfinite(x).any():
                break
            if self.reads == "count" and int((x > 0).sum()) == 0:
                break
        assert self.reads != "printed" or error.item() > 0
        return x


@pytest.mark.parametrize("reads", ["error", "size", "any", "count", "printed", "nothing"])
def test_steps_that_depend_on_the_whole_batch_are_known(reads: str, tmp_path: Path) -> None:
    """An adaptive solver takes other steps for parts of a batch; counts, checks and printed numbers change none."""
    model = Solver(reads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(30, 6)).mean().backward()
            optimizer.step()
    step = Trace.open(tmp_path / "run.memprof").steady_step()
    assert repeats_by_batch(step) == (reads in ("error", "size"))


def test_parts_are_as_tensor_split_has_them() -> None:
    """The remainder goes to the first parts; a batch of fewer samples has one part a sample."""
    for size in range(1, 14):
        for parts in range(2, 6):
            expected = [len(part) for part in torch.arange(size).tensor_split(min(parts, size))]
            assert part_sizes(size, parts).tolist() == expected


def test_a_step_without_training_is_refused(recorded: dict[str, Step]) -> None:
    """Evaluation has nothing to accumulate."""
    step = recorded["lstm"]
    phase = step.ops.phase.copy()
    phase[phase == "backward"] = "other"
    with pytest.raises(PolicyError, match="a step with a backward and an update"):
        Accumulate(2).transform(dataclasses.replace(step, ops=step.ops.replace(phase=phase)))


# -- splitting --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["image", "label"])


def test_batches_of_any_structure_are_split() -> None:
    """Tuples, dicts and lists keep their types, names are split with the tensors, and other values are shared."""
    scale = torch.ones(3)
    batch = {"pair": Pair(torch.arange(10), torch.arange(20).view(10, 2)), "names": list("abcdefghij"), "scale": scale}
    parts = split_batch(batch, 4)
    assert parts is not None
    assert [len(part.batch["pair"].image) for part in parts] == [3, 3, 2, 2]
    assert isinstance(parts[0].batch["pair"], Pair)
    assert parts[1].batch["names"] == ["d", "e", "f"]
    assert parts[3].batch["scale"] is scale
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert torch.equal(torch.cat([part.batch["pair"].label for part in parts]), batch["pair"].label)


def test_images_of_any_size_in_a_list_are_split_by_the_list() -> None:
    """Where the loader says how many samples there are, a list of so many is the batch, not the channels within."""
    batch = ([torch.zeros(3, size, size) for size in (4, 5, 6, 7)], [{"box": torch.zeros(2, 4)} for _ in range(4)])
    parts = split_batch(batch, 2, expected_size=4)
    assert parts is not None
    assert [len(part.batch[0]) for part in parts] == [2, 2]
    assert [len(part.batch[1]) for part in parts] == [2, 2]


@dataclass(frozen=True)
class Record:
    """What a collate function of a job's own may return."""

    image: torch.Tensor
    names: list[str]
    scale: float = 1.0


def test_dataclasses_are_split_by_field() -> None:
    """Frozen ones too; they keep their type."""
    parts = split_batch(Record(torch.arange(6).view(6, 1), list("abcdef")), 3)
    assert parts is not None
    assert [type(part.batch) for part in parts] == [Record] * 3
    assert [part.batch.image.flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.batch.names for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_graphs_are_split_by_graph() -> None:
    """A batch of torch_geometric is one graph of many parts: nodes go with their graph, and edges keep their ends."""
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [data.Data(x=torch.full((2 + k, 1), float(k)), edge_index=edges, y=torch.tensor([k])) for k in range(5)]
    batch = data.Batch.from_data_list(graphs)
    parts = split_batch(batch, 2, expected_size=8)
    assert parts is not None
    assert [part.batch.num_graphs for part in parts] == [3, 2]
    assert parts[1].batch.x.flatten().tolist() == [3.0] * 5 + [4.0] * 6
    assert parts[1].batch.edge_index.tolist() == [[0, 1, 5, 6], [1, 0, 6, 5]]
    assert torch.cat([part.batch.y for part in parts]).tolist() == list(range(5))
    nested = split_batch((batch, torch.arange(5)), 5)
    assert nested is not None
    assert [len(part.batch[1]) for part in nested] == [1] * 5
    assert [part.batch[0].num_graphs for part in nested] == [1] * 5


def test_what_cannot_be_split_is_told() -> None:
    """Packed sequences lie interleaved, and text has no tensors."""
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert batch_size((packed, torch.zeros(2))) is None
    with pytest.raises(PolicyError, match="cannot split a str"):
        next(micro_batches("text", 2))


# -- training ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Setup:
    """A model, its optimizer and a loader whose last batch is smaller."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.loader = DataLoader(TensorDataset(torch.randn(26, 6), torch.randint(3, (26,))), batch_size=10)
        self.updates = 0
        self.optimizer.register_step_post_hook(self._count)
        self.job = Job(self.model, [self.optimizer])

    def _count(self, *args: Any) -> None:
        self.updates += 1

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def run(setup: Setup, loop: str, scheduler: Any = None) -> None:
    """One epoch of a loop as people write them."""
    model, optimizer = setup.model, setup.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    for batch in setup.loader:
        if loop == "zero at the end":
            setup.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        elif loop == "model.zero_grad":
            model.zero_grad()
            setup.loss(batch).backward()
            optimizer.step()
        elif loop == "closure":

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = setup.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        elif loop == "scaler":
            optimizer.zero_grad()
            scaler.scale(setup.loss(batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.zero_grad()
            setup.loss(batch).backward()
            if loop == "clip norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if loop == "clip value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


LOOPS = ("plain", "zero at the end", "model.zero_grad", "closure", "scaler", "clip norm", "clip value")


@pytest.mark.parametrize("loop", LOOPS)
def test_training_is_that_of_the_whole_batch(loop: str) -> None:
    """Whatever the loop looks like, uneven parts included, parameters are those of the plain run but for rounding."""
    plain, parted = Setup(), Setup()
    run(plain, loop)
    Accumulate(4).apply(parted.job)
    run(parted, loop)
    assert plain.updates == parted.updates == 3
    torch.testing.assert_close(parted.weights(), plain.weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ahead", [2, 4])
def test_a_loop_that_takes_batches_ahead_goes_on_doing_so(ahead: int) -> None:
    """One update of all batches in a list, whose parts are of different sizes and wait there for their backward."""
    weights = []
    for parts in (1, 2):
        setup = Setup()
        setup.loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))), batch_size=5)
        if parts > 1:
            Accumulate(parts).apply(setup.job)
        batches = iter(setup.loader)
        while taken := list(itertools.islice(batches, ahead)):
            for batch in taken:
                (setup.loss(batch) / ahead).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        assert setup.updates == 8 // ahead
        weights.append(setup.weights())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_evaluation_sees_whole_batches() -> None:
    """Only while the model is in training mode are batches split, also between two micro-batches."""
    setup = Setup()
    Accumulate(2).apply(setup.job)
    sizes = []
    for batch in setup.loader:
        setup.loss(batch).backward()
        setup.model.eval()
        sizes.append([len(each[0]) for each in setup.loader])
        setup.model.train()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    assert sizes == [[10, 10, 6]] * 6
    assert setup.updates == 3


def test_a_batch_left_halfway_is_dropped_whole() -> None:
    """Gradients of a batch whose last part never ran do not leak into the next."""
    plain, parted = Setup(), Setup()
    run(plain, "zero at the end")
    Accumulate(2).apply(parted.job)
    for batch in parted.loader:
        parted.loss(batch).backward()
        parted.optimizer.step()
        break
    run(parted, "zero at the end")
    torch.testing.assert_close(parted.weights(), plain.weights(), rtol=1e-4, atol=1e-5)


def test_a_plan_applied_within_the_loop_begins_with_the_next_batch() -> None:
    """At the model's first forward the first batch already exists: it is not split, with a note."""
    setup, sizes = Setup(), []
    for batch in setup.loader:
        if not sizes:
            Accumulate(2).apply(setup.job)
        sizes.append(len(batch[0]))
        setup.optimizer.zero_grad()
        setup.loss(batch).backward()
        setup.optimizer.step()
    assert sizes == [10, 5, 5, 3, 3]
    assert setup.updates == 3
    assert any("is not split; the next one is" in note for note in setup.job.notes)


def test_a_script_can_be_split_from_its_first_batch() -> None:
    """Begun before the script, the plan finds the first part in hand when it is applied; what ran without gradients
    before, such as a trial evaluation, saw whole batches."""
    plain, parted = Setup(), Setup()
    run(plain, "plain")
    split_from_start(2)
    with torch.no_grad():
        assert [len(batch[0]) for batch in parted.loader] == [10, 10, 6]
    sizes = []
    for batch in parted.loader:
        if not sizes:
            Accumulate(2).apply(parted.job)
        sizes.append(len(batch[0]))
        parted.optimizer.zero_grad()
        parted.loss(batch).backward()
        parted.optimizer.step()
    assert sizes == [5, 5, 5, 5, 3, 3]
    assert parted.updates == 3
    assert not any("is not split; the next one is" in note for note in parted.job.notes)
    torch.testing.assert_close(parted.weights(), plain.weights(), rtol=1e-4, atol=1e-5)


def test_micro_batches_in_a_loop_of_ones_own() -> None:
    """Where no DataLoader feeds the model, micro_batches() in the loop does the same; a loader's part stays whole."""
    plain, parted = Setup(), Setup()
    data = [(torch.randn(7, 6), torch.randint(3, (7,))) for _ in range(3)]
    Accumulate(3).apply(parted.job)
    for setup in (plain, parted):
        for batch in data:
            for part in micro_batches(batch, 3) if setup is parted else [batch]:
                setup.optimizer.zero_grad()
                setup.loss(part).backward()
                setup.optimizer.step()
    assert parted.updates == 3
    torch.testing.assert_close(parted.weights(), plain.weights(), rtol=1e-4, atol=1e-5)
    assert [len(part[0]) for batch in parted.loader for part in micro_batches(batch, 3)] == [4, 3, 3, 4, 3, 3, 2, 2, 2]


# -- refusals and undo ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def leave_nothing() -> Any:
    """Takes back what a test applied: the iterators of all DataLoaders are changed."""
    made: list[Job] = []
    before = Job.__init__

    def note(job: Job, *args: Any, **kwargs: Any) -> None:
        before(job, *args, **kwargs)
        made.append(job)

    Job.__init__ = note  # type: ignore[method-assign]
    yield
    Job.__init__ = before  # type: ignore[method-assign]
    for job in made:
        job.undo()
    assert not ACTIVE


def test_a_job_without_a_loader_is_told_what_to_write() -> None:
    """The first update without any micro-batch raises, with the line to put into the loop."""
    setup = Setup()
    Accumulate(4).apply(setup.job)
    setup.loss((torch.randn(4, 6), torch.zeros(4, dtype=torch.long))).backward()
    with pytest.raises(PolicyError, match=r"for part in memprof\.micro_batches\(batch, 4\)"):
        setup.optimizer.step()


def test_gradients_that_would_be_mixed_up_are_refused() -> None:
    """What a loop drops because it has become useless would stay with the gradients that are held back."""
    setup = Setup()
    Accumulate(2).apply(setup.job)
    batches = iter(setup.loader)
    setup.loss(next(batches)).backward()
    setup.optimizer.step()
    setup.loss(next(batches)).backward()
    with pytest.raises(PolicyError, match="before any step"):
        setup.optimizer.zero_grad()


def weighed(setup: Setup, batch: Any, loss: torch.Tensor) -> None:
    """Weighs a second loss by a gradient of the first, as VQGAN's."""
    (gradient,) = torch.autograd.grad(loss, setup.model.second.weight, retain_graph=True)
    (loss + gradient.norm().detach() * setup.model(batch[0]).mean()).backward()


def penalized(setup: Setup, batch: Any, loss: torch.Tensor) -> None:
    """Differentiates gradients that backward has left."""
    loss.backward(create_graph=True)


def in_turn(setup: Setup, batch: Any, loss: torch.Tensor) -> None:
    """Updates between two backwards, as two networks do that train in turn."""
    loss.backward()
    setup.optimizer.step()
    setup.model.zero_grad()
    setup.loss(batch).backward()


@pytest.mark.parametrize(("backward", "sentence"), [(weighed, WEIGHED), (penalized, NOT_A_MEAN), (in_turn, IN_TURN)])
def test_a_backward_that_needs_the_whole_batch_is_refused(backward: Any, sentence: str) -> None:
    """Its micro-batches would train something else; gradients of inputs belong to one sample each."""
    setup = Setup()
    Accumulate(2).apply(setup.job)
    batch = next(iter(setup.loader))
    inputs = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(setup.model(inputs).sum(), inputs, create_graph=True)
    with pytest.raises(PolicyError) as refused:
        backward(setup, batch, setup.loss(batch) + slope.square().mean())
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("optimizers", "sentence"),
    [
        ([], "none existed when the model was called"),
        ([torch.optim.LBFGS], "calls its closure many times"),
    ],
)
def test_jobs_that_do_not_fit_are_refused_unchanged(optimizers: Any, sentence: str) -> None:
    """A refusal comes before anything is changed."""
    setup = Setup()
    before = torch.autograd.backward
    with pytest.raises(PolicyError, match=sentence):
        Accumulate(2).apply(Job(setup.model, [kind(setup.model.parameters()) for kind in optimizers]))
    assert torch.autograd.backward is before


def test_batch_norm_is_warned_of() -> None:
    """Statistics over fewer samples are other statistics."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    Accumulate(2).apply(job)
    assert any("1 BatchNorm layers take their statistics over one micro-batch" in note for note in job.notes)


def test_undo_leaves_everything_as_it_was() -> None:
    """After undo the loader, the optimizer, clipping, scalers and schedulers are torch's own again."""
    from torch.nn.utils import clip_grad
    from torch.utils.data import dataloader

    def places() -> list[Any]:
        kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
        return [
            dataloader._BaseDataLoaderIter.__next__,
            torch.autograd.backward,
            clip_grad._clip_grads_with_norm_,
            cell_of_body(clip_grad.clip_grad_value_).cell_contents,
            *(kind.step for kind in kinds),
        ]

    setup, before = Setup(), places()
    Accumulate(2).apply(setup.job)
    assert not any(one is other for one, other in zip(places(), before, strict=True))
    setup.job.undo()
    assert all(one is other for one, other in zip(places(), before, strict=True))
    assert not {"step", "zero_grad"} & vars(setup.optimizer).keys()
    assert "zero_grad" not in vars(setup.model)
    assert [len(batch[0]) for batch in setup.loader] == [10, 10, 6]


@pytest.mark.parametrize("rounds", [1, 2])
def test_loader_that_fetches_a_batch_ahead_is_followed(rounds: int) -> None:
    """accelerate's loader has the next batch before the loop gets this one: updates and weights stay what they are,
    also where accelerate accumulates over several batches itself."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def train_under(plan: Plan | None) -> tuple[int, torch.Tensor]:
        gc.collect()
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=rounds)
        accelerator.gradient_accumulation_steps = rounds  # its state is one for all of a process
        inside = nn.Linear(8, 1)
        inner = torch.optim.SGD(inside.parameters(), lr=0.1)
        updates = []
        inner.register_step_post_hook(lambda *_: updates.append(1))
        data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
        applied = Job(inside, [inner])
        if plan is not None:
            plan.apply(applied)
        model, optimizer, loader = accelerator.prepare(inside, inner, DataLoader(data, batch_size=4))
        for rows, wanted in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(rows) - wanted).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        applied.undo()
        return len(updates), torch.cat([each.detach().flatten() for each in inside.parameters()])

    count, whole = train_under(None)
    parted_count, parted = train_under(Plan((Accumulate(2),)))
    assert parted_count == count == 6 // rounds
    torch.testing.assert_close(parted, whole)


@pytest.mark.parametrize(
    ("layer", "loss", "changes"),
    [
        (torch.nn.BatchNorm1d(16), "mean", ["a BatchNorm layer takes statistics over a micro-batch"]),
        (torch.nn.BatchNorm1d(16, track_running_stats=False), "mean", ["a BatchNorm layer takes statistics"]),
        (torch.nn.SyncBatchNorm(16).eval(), "mean", []),
        (torch.nn.GroupNorm(4, 16), "mean", []),
        (torch.nn.LayerNorm(16), "mean", []),
        (torch.nn.InstanceNorm1d(16), "mean", []),
        (torch.nn.InstanceNorm1d(16, track_running_stats=True), "mean", ["forward updates buffers of 1 once"]),
        (
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 16)),
            "mean",
            ["forward updates buffers of"],
        ),
        (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16)), "mean", []),
        (torch.nn.Dropout(0.5), "mean", ["dropout and other draws get other random numbers"]),
        (torch.nn.Identity(), "sum", ["the loss is a sum over its batch"]),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, torch.nn.Module) else None,
)
def test_what_micro_batches_change_beyond_rounding_is_said(layer, loss, changes, tmp_path):
    """Statistics, states of a forward, draws and sums depend on how a batch is divided; norms of a sample do not."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), layer, torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with memprof.record(tmp_path / "run.memprof", steps=1, skip=1):
        for _ in range(2):
            getattr(model(torch.randn(8, 16, 16)).square(), loss)().backward()
            optimizer.step()
            optimizer.zero_grad()
    step = Trace.open(tmp_path / "run.memprof").fullest_step()
    policy = Accumulate(2)
    found = policy.changes(step)
    assert [text[: len(start)] for text, start in zip(found, changes, strict=True)] == changes
    assert policy.numerics_in(step) == ("different" if changes else "rounding")
