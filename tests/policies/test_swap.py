from __future__ import annotations

import copy
import gc
import io
import resource
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memprof
from memprof.errors import PolicyError
from memprof.policies.compress.policy import Compress
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.moves import Moves
from memprof.policies.swap.policy import DEFAULT_GBPS, Swap
from memprof.policies.swap.transfers import DiskCarrier, Extents
from memprof.trace.store import Trace
from tests.policies.faces import compare, load_job, peaks, record_step, recorded, train

LAYERS = {"gpt": "layers.*", "resnet": "stages.*", "lstm": "layers.*", "unet": "down.*", "shared": "mixer"}


def disk(name: str, **settings: object) -> Swap:
    return Swap(**{"modules": (LAYERS[name],), "to": "disk", "minimum_bytes": 1 << 12, **settings})


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"modules": ()}, "patterns"),
        ({"what": "gradients"}, "activations, optimizer or parameters"),
        ({"to": "tape"}, "host or disk"),
        ({"minimum_bytes": -1}, "minimum_bytes = 65536"),
        ({"prefetch": -1}, "prefetch = 1"),
        ({"gbps": float("nan")}, "gbps"),
        ({"folder": "/tmp"}, "only on disk"),
    ],
)
def test_refuses_settings_without_sense(settings, said):
    """Each invalid setting is refused with a valid example."""
    with pytest.raises(PolicyError, match=said):
        Swap(**settings)


def test_reads_the_flag():
    """The short form chooses modules, or what is moved, and where to."""
    assert Swap.from_flag("layers.[0-3]") == Swap(modules=("layers.[0-3]",))
    assert Swap.from_flag("layers.*, head:disk") == Swap(modules=("layers.*", "head"), to="disk")
    assert Swap.from_flag("optimizer:disk") == Swap(what="optimizer", to="disk")
    assert Swap.from_flag("parameters,layers.*:host") == Swap(what="parameters", modules=("layers.*",))
    for text in ("", ":disk", "layers.*:tape"):
        with pytest.raises(PolicyError, match="--swap"):
            Swap.from_flag(text)


# -- the two faces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt", {}),
        ("resnet", {"prefetch": 2}),
        ("lstm", {"modules": ("**",), "prefetch": 0}),
        ("unet", {"modules": ("**",)}),
        ("gpt", {"what": "optimizer"}),
        ("resnet", {"what": "parameters", "minimum_bytes": 1 << 10}),
    ],
)
def test_prediction_is_exact(name, settings):
    """The peak predicted from the plain step is the measured one to the byte (one element stands in for state)."""
    plan = Plan((disk(name, **settings),))
    predicted = plan.transform(recorded(name))
    measured = record_step(name, plan)
    assert peaks(predicted)[0] == pytest.approx(peaks(measured)[0], abs=4), compare(predicted, measured)
    assert peaks(predicted)[0] < peaks(recorded(name))[0]
    assert predicted.duration_us > recorded(name).duration_us


@pytest.mark.parametrize("what", ["activations", "optimizer", "parameters"])
def test_copies_are_operators_of_their_own(what):
    """The copies are operators of kind copy, and nothing contradicts itself."""
    step = recorded("gpt")
    changed = disk("gpt", what=what).transform(step)
    changed.check()
    copies = changed.ops.take(changed.ops.kind == "copy")
    assert set(copies.name) == {"memprof.swap_out", "memprof.swap_in"}
    assert (copies.duration_us == copies.read_bytes / (DEFAULT_GBPS["disk"] * 1e3)).all()


def test_slow_copies_stall_the_step():
    """At 0.01 GB/s the step takes at least as long as its copies out and back."""
    step = recorded("gpt")
    slow = disk("gpt", gbps=0.01).transform(step)
    copies = slow.ops.take(slow.ops.kind == "copy")
    assert slow.duration_us >= copies.duration_us.sum()
    assert peaks(slow) == peaks(disk("gpt").transform(step))


def test_nothing_large_enough_changes_nothing_in_memory():
    """With a minimum above every storage the peak stays."""
    step = recorded("gpt")
    assert peaks(disk("gpt", minimum_bytes=1 << 40).transform(step)) == peaks(step)


# -- training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt", {}),
        ("gpt", {"modules": ("**",), "minimum_bytes": 0, "prefetch": 3}),
        ("resnet", {"minimum_bytes": 0}),
        ("lstm", {"prefetch": 0}),
        ("unet", {"modules": ("**",)}),
        ("shared", {}),
        ("gpt", {"what": "optimizer", "minimum_bytes": 0}),
        ("resnet", {"what": "optimizer"}),
        ("gpt", {"what": "optimizer", "modules": ("layers.0", "head"), "minimum_bytes": 0}),
        ("gpt", {"what": "parameters", "minimum_bytes": 0}),
        ("shared", {"what": "parameters", "modules": ("**",)}),
    ],
)
def test_training_is_equal_to_the_bit(name, settings):
    """Losses, parameters, buffers and gradients after three steps are those of the plain run, to the bit."""
    plain, swapped = train(name), train(name, Plan((disk(name, **settings),)))
    assert plain.losses == swapped.losses
    for expected, found in ((plain.state, swapped.state), (plain.gradients, swapped.gradients)):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), key


class Views(torch.autograd.Function):
    """Saves two views of one storage and notes what it gets back."""

    shares: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x[:2], x[2:].t())
        return x.sum() * 2

    @staticmethod
    def backward(ctx, grad):
        top, rest = ctx.saved_tensors
        Views.shares.append(top.untyped_storage()._cdata == rest.untyped_storage()._cdata)
        return grad * torch.cat([top, rest.t()])


class Part(nn.Module):
    """A module whose forward is given to it."""

    def __init__(self, body):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.body = body

    def forward(self, x):
        return self.body(x * self.weight)


def swapped_part(body, **settings) -> tuple[Part, Job]:
    part = Part(body)
    job = Job(part)
    Swap(to="disk", minimum_bytes=0, **settings).apply(job)
    return part, job


def test_views_come_back_as_views_of_one_storage():
    """Two saved views of one storage are one copy, with their sizes and strides."""
    part, job = swapped_part(Views.apply)
    x = torch.randn(8, 64)
    part(x).backward()
    assert Views.shares.pop()
    torch.testing.assert_close(part.weight.grad, (x * x).sum(0))
    job.undo()


def test_a_change_in_place_is_found():
    """Changing what was saved raises PyTorch's own error, though its hooks switch that check off."""
    kept = []

    def body(x):
        kept.append(y := x.exp())
        return y.sum()

    part, job = swapped_part(body)
    loss = part(torch.randn(4, 64))
    kept.pop().detach().add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 1; expected version 0"):
        loss.backward()
    job.undo()


def test_a_parameter_changed_in_place_is_found():
    """What stays in memory is checked as well."""
    part, job = swapped_part(lambda x: x.sum())
    loss = part(torch.randn(4, 64, requires_grad=True))
    with torch.no_grad():
        part.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    job.undo()


@pytest.mark.parametrize("pattern", ["**", "layers.*"])
def test_regions_of_checkpoint_are_left_to_it(pattern):
    """Activation checkpointing inside and around a swapped module runs as before, with the same gradients."""
    gradients = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 64))

        class Outer(nn.Module):
            def __init__(self, layers):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                x = checkpoint(self.layers, x.sin(), use_reentrant=False)
                return checkpoint(lambda y: self.layers(y).tanh(), x, use_reentrant=False)

        model = Outer(inner)
        job = Job(model)
        if is_swapped:
            Swap(modules=(pattern,), to="disk", minimum_bytes=0).apply(job)
        model(torch.randn(8, 64)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        job.undo()
    for plain, swapped in zip(*gradients, strict=True):
        assert torch.equal(plain, swapped)


def test_a_full_disk_stops_swapping_not_training():
    """If the file cannot grow, saved tensors stay in memory, with one warning."""
    part, job = swapped_part(lambda x: x.exp().sin().tanh().sum())
    plain = Part(part.body)
    x = torch.randn(64, 64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="stay in memory"):
            part(x).backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    plain(x).backward()
    assert torch.equal(part.weight.grad, plain.weight.grad)
    job.undo()


# -- refusals and undoing ---------------------------------------------------------------------------------------


def test_refuses_host_memory_for_a_job_in_it():
    """On a processor there is nowhere to go but the disk: both faces say so."""
    with pytest.raises(PolicyError, match=r"already in host memory.*to = 'disk'"):
        Swap(modules=("layers.*",)).transform(recorded("gpt"))
    with pytest.raises(PolicyError, match=r"already in host memory.*to = 'disk'"):
        Swap().apply(Job(nn.Linear(4, 4)))


def test_refuses_before_anything_is_changed():
    """A pattern without a match, a folder that is none, or a missing optimizer leaves the model as it was."""
    model = nn.Sequential(nn.Linear(4, 4))
    before = threading.active_count()
    for policy, said in (
        (Swap(modules=("layers.*",), to="disk"), "no module"),
        (Swap(to="disk", folder="/nowhere/at/all"), "cannot write to /nowhere/at/all"),
        (Swap(what="optimizer", to="disk"), "state needs an optimizer"),
        (Swap(what="parameters", to="disk"), "needs an optimizer"),
    ):
        job = Job(model)
        with pytest.raises(PolicyError, match=said):
            Plan((policy,)).apply(job)
        assert "forward" not in vars(model)
        assert threading.active_count() == before


def test_refuses_two_policies_for_the_same_modules():
    """swap and compress of the same modules, or of one inside the other, are refused by both faces."""
    for both in (
        (disk("gpt"), Compress(modules=("layers.1.mlp",))),
        (disk("gpt", modules=("layers.0",)), disk("gpt", what="parameters", minimum_bytes=1)),
    ):
        model = load_job("gpt").make_model()
        job = Job(model, [torch.optim.SGD(model.parameters())])
        with pytest.raises(PolicyError, match="choose separate modules"):
            Plan(both).apply(job)
        assert all("forward" not in vars(module) for module in model.modules())
        with pytest.raises(PolicyError, match="choose separate modules"):
            Plan(both).transform(recorded("gpt"))


@pytest.mark.parametrize("what", ["activations", "optimizer", "parameters"])
def test_undo_restores_the_job(what):
    """Undoing gives the forward, the hooks, the parameters, the state, the thread and the file back."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    before, storages = threading.active_count(), [p.shape for p in model.parameters()]
    job = Job(model, [optimizer])
    Swap(modules=("0", "2"), what=what, to="disk", minimum_bytes=1).apply(job)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    job.undo()
    assert threading.active_count() == before
    assert all("forward" not in vars(module) for module in model.modules())
    assert [p.shape for p in model.parameters()] == storages
    assert all(p.isfinite().all() and p.is_contiguous() for p in model.parameters())
    assert all(state["exp_avg"].isfinite().all() for state in optimizer.state.values())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()


# -- the order of things ----------------------------------------------------------------------------------------


class Log:
    """A carrier that copies nothing and writes down what it is asked."""

    device = "cpu"

    def __init__(self):
        self.said: list[str] = []
        self.sizes: dict[int, int] = {}

    def send(self, storage):
        self.said.append(f"out {len(self.sizes)}")
        self.sizes[len(self.sizes)] = storage.nbytes()
        return len(self.sizes) - 1

    def sent(self, place):
        self.said.append(f"gone {place}")
        return True

    def fetch(self, place):
        self.said.append(f"back {place}")
        return torch.UntypedStorage(self.sizes[place])

    def fetched(self, place):
        self.said.append(f"here {place}")

    def forget(self, place, storage):
        self.said.append(f"forgotten {place}")


def test_what_is_packed_first_leaves_first_and_comes_back_last():
    """One node later a storage is let go; needing one starts the one packed before it, and waits for itself only."""
    log = Log()
    moves = Moves(log, 0, 1)
    taken = []
    for _ in range(3):
        torch.ones(2, requires_grad=True).exp()  # a node: autograd counts on
        taken.append(moves.take(torch.zeros(8)))
    moves.flush()
    assert log.said == ["out 0", "gone 0", "out 1", "gone 1", "out 2", "gone 2"]
    log.said.clear()
    taken[2].restored()
    taken[1].restored()
    assert log.said == ["back 2", "back 1", "here 2", "back 0", "here 1"]
    log.said.clear()
    del taken
    gc.collect()
    assert sorted(log.said) == ["forgotten 0", "forgotten 1", "forgotten 2"]


def test_an_original_still_held_is_not_fetched():
    """While the storage is referenced, backward uses it."""
    log = Log()
    moves = Moves(log, 0, 1)
    tensor = torch.zeros(8)
    moved = moves.take(tensor)
    moves.flush()
    assert moved.restored() is tensor.untyped_storage()
    assert "back 0" not in log.said


def test_bytes_come_back_as_they_were_and_the_place_is_used_again():
    """The file returns the data written to it; released extents are reused."""
    carrier = DiskCarrier("")
    tensor = torch.randn(3000)
    place = carrier.send(tensor.untyped_storage())
    assert carrier.sent(place)
    back = carrier.fetch(place)
    carrier.fetched(place)
    assert bytes(back) == bytes(tensor.untyped_storage())
    carrier.forget(place, back)
    again = carrier.send(tensor.untyped_storage())
    assert again.offset == place.offset
    carrier.close()


def test_extents_merge():
    """Released extents are merged; the smallest that fits is used, and the end moves back."""
    extents = Extents()
    offsets = [extents.take(4096 * pages) for pages in (1, 2, 3, 1)]
    assert offsets == [0, 4096, 3 * 4096, 6 * 4096]
    extents.give(0, 4096)
    extents.give(3 * 4096, 3 * 4096)
    assert extents.take(100) == 0
    extents.give(4096, 2 * 4096)
    assert extents.take(5 * 4096) == 4096
    extents.give(4096, 5 * 4096)
    extents.give(6 * 4096, 4096)
    assert extents.end == 4096


def test_records_die_with_the_graph():
    """Dropping a loss without backward gives the memory and the place in the file back."""
    part, job = swapped_part(lambda x: x.exp().sum())
    x = torch.randn(64, 64)
    loss = part(x)
    references = [weakref.ref(value) for value in gc.get_objects() if type(value).__name__ == "Moved"]
    assert references
    del loss
    gc.collect()
    assert all(reference() is None for reference in references)
    job.undo()


def test_tensors_of_one_storage_with_a_counter_each_keep_their_own_content() -> None:
    """A GRU cell changes the gates of one storage in place, one after the other, and saves each of them."""
    torch.manual_seed(0)
    cell, before, inputs = nn.GRUCell(64, 64), torch.randn(32, 64), torch.randn(32, 64)

    def gradients(*policies: Swap) -> list[torch.Tensor]:
        job = Job(cell)
        for policy in policies:
            policy.apply(job)
        hidden = before
        for _ in range(3):
            hidden = cell(inputs, hidden)
        found = torch.autograd.grad(hidden.square().sum(), list(cell.parameters()))
        job.undo()
        return list(found)

    plain = gradients()
    for distance in (0, 1, 3):
        swapped = gradients(Swap(to="disk", minimum_bytes=1, prefetch=distance))
        assert all(torch.equal(one, other) for one, other in zip(plain, swapped, strict=True))


def test_the_history_of_lbfgs_stays(tmp_path):
    """It is in lists, and in use while the closure runs: both faces refuse with the same words."""
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    policy = Swap(what="optimizer", to="disk", minimum_bytes=1)
    with pytest.raises(PolicyError, match="history of gradients in lists") as applied:
        policy.apply(Job(model, [optimizer]))
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=1):
        for _ in range(2):
            optimizer.step(closure)
    with pytest.raises(PolicyError) as predicted:
        policy.transform(Trace.open(tmp_path / "run.memprof").fullest_step())
    assert str(predicted.value) == str(applied.value)


# -- what is read while it is out -------------------------------------------------------------------------------


@torch.jit.script
def scripted_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_state_that_is_out_comes_back_on_any_read(kind: Any, one_by_one: bool) -> None:
    """Norms, saved and copied state, kept tensors, views and changes in place are those of the plain run."""

    def train_reading(*policies: Swap) -> list[float]:
        torch.manual_seed(0)
        model, seen, kept, views = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), [], [], []
        settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, **settings)
        job = memprof.apply(Plan(policies), model, optimizer) if policies else Job(model)
        key = "exp_avg" if kind is torch.optim.AdamW else "momentum_buffer"
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            state = [optimizer.state[each][key] for each in model.parameters()]
            seen.append(loss.item())
            if step == 1:
                seen += [sum(each.norm().item() for each in state), *(scripted_sum(each).item() for each in state)]
            elif step == 2:
                buffer = io.BytesIO()
                torch.save(optimizer.state_dict(), buffer)
                buffer.seek(0)
                saved, copied = torch.load(buffer), copy.deepcopy(optimizer)
                seen += [each[key].norm().item() for each in saved["state"].values()]
                seen += [each[key].norm().item() for each in copied.state.values()]
                kept = state
            elif step == 3:
                optimizer.load_state_dict(saved)
                seen += [each.norm().item() for each in kept]
            elif step == 4:
                kept = state
            elif step == 5:
                for each in kept:
                    each.mul_(0.5)
            elif step == 6:
                views = [each.view(-1)[:2] for each in kept]
            elif step > 6:
                seen += [each.sum().item() for each in views]
        job.undo()
        assert all(type(each[key]) is torch.Tensor for each in optimizer.state.values())
        return [*seen, *(each.norm().item() for each in model.parameters())]

    state = Swap(what="optimizer", to="disk", minimum_bytes=1, one_by_one=one_by_one)
    assert train_reading(state) == train_reading()


def test_state_that_was_read_leaves_when_a_module_is_called() -> None:
    """After a read it is in memory up to the next call of a module, not for the whole step."""
    model = nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    job = memprof.apply(Plan((Swap(what="optimizer", to="disk"),)), model, optimizer)
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    average = optimizer.state[model.weight]["exp_avg"]
    assert type(average) is not torch.Tensor
    assert average.sum() > 0
    assert type(average) is torch.Tensor
    model(torch.ones(2, 128))
    assert type(average) is not torch.Tensor
    job.undo()


def test_reads_of_state_are_predicted(tmp_path: Path) -> None:
    """A step that logs a moment between forward and backward has all of it in memory there: 4 x 256 KiB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    policy = Swap(what="optimizer", to="disk")
    found = []
    for plan in (Plan(()), Plan((policy,))):
        optimizer = torch.optim.AdamW(model.parameters())
        job = memprof.apply(plan, model, optimizer) if plan.policies else Job(model)
        path = tmp_path / f"{len(plan.policies)}.memprof"
        with memprof.record(path, skip=2, steps=2):
            for _ in range(5):
                optimizer.zero_grad()
                loss = model(torch.ones(8, 256)).square().mean()
                for each in list(model.parameters()):
                    if each in optimizer.state:
                        optimizer.state[each]["exp_avg"].sum().item()
                loss.backward()
                optimizer.step()
        found.append(Trace.open(path).fullest_step())
        job.undo()
    plain, measured = found
    predicted = policy.transform(plain)
    np.testing.assert_allclose(peaks(predicted)[0], peaks(measured)[0], atol=4)
    backward = int(np.flatnonzero(predicted.ops.phase == "backward")[0])
    state = predicted.storages.take(np.flatnonzero(predicted.storages.category == "optimizer_state"))
    is_there = (state.created_op_id < backward) & ((state.freed_op_id == -1) | (state.freed_op_id > backward))
    assert state.requested_bytes[is_there & (state.requested_bytes > 1 << 16)].tolist() == [1 << 18] * 2


def test_weights_that_are_out_come_back_on_any_read() -> None:
    """A weight read by its name in the loss is the weight, and no NaN is trained on."""

    def losses(*policies: Swap) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job = memprof.apply(Plan(policies), model, optimizer) if policies else Job(model)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean() + 0.1 * model[0].weight.square().mean()
            loss.backward()
            optimizer.step()
            seen += [loss.item(), copy.deepcopy(model[2].weight).norm().item()]
        job.undo()
        return seen

    assert losses(Swap(("*",), "parameters", "disk", 1)) == losses()
