"""Activation checkpointing: predictions are exact to the byte, and training is bit-identical."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

import memprof
from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.checkpoint.second_forward import Arguments
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import load_job, one_thread, peaks, record_step, recorded, train

#: Job and flag; "" is the root.
CASES = (
    ("gpt", "layers.*"),
    ("gpt", "layers.* keep=matmul,attention"),
    ("resnet", "stages.*"),
    ("resnet", "segments=3"),
    ("lstm", "layers.*"),
    ("vit", "encoder,encoder.blocks.*"),
    ("unet", "down.*,up.* keep=conv"),
    ("shared", "mixer"),
    ("shared", ""),
)


def policy_of(flag: str) -> Checkpoint:
    return Checkpoint.from_flag(flag) if flag else Checkpoint(modules=("",))


@pytest.mark.parametrize(("job", "flag"), CASES)
def test_predicted_peak_is_the_measured_one_to_the_byte(job, flag):
    """The peak predicted from the plain recording is the one that torch reaches under the policy, in the same phase."""
    predicted = policy_of(flag).transform(recorded(job))
    assert peaks(predicted) == peaks(record_step(job, Plan((policy_of(flag),))))


@pytest.mark.parametrize(("job", "flag"), [("unet", "down.*,up.*"), ("resnet", "stem")])
def test_every_operator_of_the_step_holds_the_predicted_bytes(job, flag):
    """Not the peak alone: the bytes alive at every operator are those measured, and so is the order of operators."""

    def curve(step: Step) -> list[tuple[str, str, int]]:
        # Checkpoint detaches what it packs: views, which the prediction leaves out.
        rows = np.flatnonzero(step.ops.name != "aten.detach.default")
        during = live_bytes(step).during
        return [(str(step.ops.phase[row]), str(step.ops.name[row]), int(during[row])) for row in rows]

    predicted = policy_of(flag).transform(recorded(job))
    assert curve(predicted) == curve(record_step(job, Plan((policy_of(flag),))))


@pytest.mark.parametrize(
    ("job", "flag"),
    [
        ("gpt", "layers.*,**.mlp"),
        ("resnet", "**"),
        ("resnet", "stages.* keep=conv"),
        ("lstm", "layers.*,dropout"),
        ("shared", "mixer,mixer.*"),
    ],
)
def test_training_stays_the_same_to_the_bit(job, flag):
    """Losses, gradients, parameters and buffers after three steps are those of the plain run: dropout draws the same
    numbers again, and BatchNorm's statistics move once."""
    plain, under = train(job), train(job, Plan((policy_of(flag),)))
    assert under.losses == plain.losses
    assert all(torch.equal(under.state[name], value) for name, value in plain.state.items())
    assert all(torch.equal(under.gradients[name], value) for name, value in plain.gradients.items())


def test_under_autocast_a_region_casts_its_weights_again():
    """Autocast's cache is empty in a recompute: a layer called four times with one weight casts it each time."""
    checkpoint, precision = Checkpoint(modules=("mixer",)), Precision.from_flag("bf16")
    under = record_step("shared", Plan((precision,)))
    assert peaks(checkpoint.transform(under)) == peaks(record_step("shared", Plan((checkpoint, precision))))


class CalledTwice(nn.Module):
    """An encoder for two inputs, as contrastive models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))

    def forward(self, first, second):
        return self.encoder(first) - self.encoder(second)


def test_under_autocast_a_module_called_twice_runs_again_with_its_matmuls_kept(tmp_path):
    """In forward the second call finds the weights cast by the first; each second run casts them anew."""
    precision, checkpoint = Precision.from_flag("bf16"), Checkpoint(modules=("encoder",), keep=("matmul",))
    steps, losses = [], []
    for applied in (Plan((precision,)), Plan((precision, checkpoint))):
        torch.manual_seed(0)
        model = CalledTwice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Job(model, [optimizer])
        applied.apply(job)
        gc.collect()
        losses.append([])
        with one_thread(), memprof.record(tmp_path / "run.memprof", force=True, skip=1, steps=1):
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(64, 32), torch.randn(64, 32)).square().mean()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
                del loss
        job.undo()
        steps.append(Trace.open(tmp_path / "run.memprof").steady_step())
    assert losses[0] == losses[1]
    assert peaks(checkpoint.transform(steps[0])) == peaks(steps[1])


def test_what_runs_again_is_marked():
    """Recomputed operators are marked: in backward, of their module, and they lengthen the step."""
    step = recorded("gpt")
    predicted = Checkpoint.from_flag("layers.1").transform(step)
    again = np.flatnonzero(predicted.ops.is_recompute)
    names = {str(predicted.modules.name[module]) for module in predicted.ops.module_id[again]}
    assert set(predicted.ops.phase[again]) == {"backward"}
    assert names
    assert all(name.startswith("layers.1") for name in names)
    assert predicted.duration_us > step.duration_us
    saved_again = np.isin(predicted.saved.forward_op_id, again)
    assert np.all(predicted.saved.released_op_id[saved_again] > predicted.saved.forward_op_id[saved_again])


def test_random_state_is_kept_for_each_call():
    """A module called four times keeps four random states of torch's from forward to backward, each of 5,056 bytes."""
    predicted = Checkpoint.from_flag("mixer").transform(recorded("shared"))
    storages = predicted.storages
    forward = (storages.created_op_id != NONE) & (predicted.ops.phase[storages.created_op_id] == "forward")
    states = storages.take(forward & (storages.allocated_bytes == 5056))
    assert len(states) == 4
    assert np.all(predicted.ops.phase[states.freed_op_id] == "backward")


SHARED_DRAWS = torch.Generator()


class Draws(nn.Module):
    """Drops out by generators that it is given, owns, and shares with others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(64, 64), torch.Generator()

    def forward(self, x, given):
        x = self.linear(x).tanh()
        for generator in (given, self.own, SHARED_DRAWS):
            x = x * torch.rand(x.shape, generator=generator)
        return x


def test_generators_of_the_job_draw_the_same_again():
    """Gradients and later draws are those of training without the policy, whichever generators forward draws from."""

    def trained(is_checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, given = nn.ModuleList([Draws(), Draws()]), torch.Generator().manual_seed(1)
        SHARED_DRAWS.manual_seed(2)
        job = Job(model)
        if is_checkpointed:
            Checkpoint(modules=("*",)).apply(job)
        for _ in range(2):
            x = torch.ones(8, 64)
            for draws in model:
                x = draws(x, given)
            x.sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, again in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 4))], ids=["scripted", "traced"]
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_regions_may_hold_scripted_modules(compiled):
    """Their classes have no forward, and a recompute cannot end inside them; gradients are those without the policy."""

    def trained(is_checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), compiled(nn.Tanh())), nn.Linear(4, 1))
        if is_checkpointed:
            Checkpoint(modules=("0",)).apply(Job(model))
        model(torch.ones(2, 4)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, again in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, again)


class Greedy(nn.Module):
    """Takes tensors in every way there is, changes a list it is given, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = False

    def forward(self, pair, *, seen, options):
        if self.fails:
            raise KeyError("mine")
        one, two = pair
        seen.append(torch.tanh(self.linear(one)))
        return {"out": seen[-1] * two + options["bias"], "count": len(seen)}


def make_greedy() -> tuple[Greedy, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Greedy(), {"bias": torch.randn(2, 4, requires_grad=True)}


def test_arguments_of_every_shape_pass_through():
    """Tuples, dicts, keywords and lists arrive as given, a list that forward changes is changed once, and gradients
    are those of the plain run."""
    found = []
    for checkpoints in (False, True):
        model, options = make_greedy()
        job = Job(model)
        if checkpoints:
            Checkpoint(modules=("",)).apply(job)
        one, two, seen = torch.ones(2, 4, requires_grad=True), torch.full((2, 4), 2.0), []
        result = model((one, two), seen=seen, options=options)
        result["out"].square().sum().backward()
        assert (result["count"], len(seen)) == (1, 1)
        found.append([one.grad, options["bias"].grad, *(p.grad for p in model.parameters())])
        job.undo()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_is_left_alone():
    """In eval mode and without gradients the forward runs as it is: nothing is packed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    Checkpoint(modules=("",)).apply(Job(model))
    plain = type(model(torch.ones(2, 4)).grad_fn._saved_result) if model.eval() else None
    assert plain is torch.Tensor
    with torch.no_grad():
        assert model.train()(torch.ones(2, 4)).grad_fn is None


def test_settings_are_read_from_the_flag():
    """The short form knows patterns, keep and segments."""
    assert Checkpoint.from_flag("layers.[0,2],head keep=matmul,conv") == Checkpoint(
        modules=("layers.[0,2]", "head"), keep=("matmul", "conv")
    )
    assert Checkpoint.from_flag("segments=4") == Checkpoint(segments=4)
    assert Checkpoint.from_flag("stages segments=2").describe() == "checkpoint stages in 2 segments"
    assert Checkpoint.from_flag("layers.* keep=conv").describe() == "checkpoint layers.* (keep conv)"


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("", "needs modules"),
        ("keep=matmul", "needs modules"),
        ("layers.* kept=matmul", "unknown setting 'kept'"),
        ("layers.* keep=matmull", "did you mean 'matmul'"),
        ("layers.* keep=lookup", "write one of matmul, conv"),
        ("segments=many", "whole number"),
        ("segments=-1", "whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flag, sentence):
    """The sentence says what is wrong and what to write."""
    with pytest.raises(PolicyError, match=sentence):
        Checkpoint.from_flag(flag)


def test_types_of_settings_are_checked():
    """A plan file may hold anything."""
    for settings in ({"modules": "layers.*"}, {"modules": (1,)}, {"segments": True}, {"segments": "2"}):
        with pytest.raises(PolicyError, match="checkpoint: "):
            Checkpoint(**settings)


@pytest.mark.parametrize(
    ("job", "flag", "sentence"),
    [
        ("gpt", "layer.*", "no module of the model matches"),
        ("gpt", "layers", "choose its submodules"),
        ("gpt", "layers.* segments=2", "requires a single"),
        ("gpt", "layers.0.mlp segments=9", "has 4 modules, fewer than 9"),
        ("resnet", "stem.2", "changes its input in place"),
        ("gpt", "layers.* keep=aten.bernoulli_.float", "changes its input in place"),
        ("gpt", "layers.0 segments=2", "segments requires"),
        ("resnet", "stem keep=norm", "changed in place later"),
    ],
)
def test_what_does_not_fit_is_refused(job, flag, sentence):
    """Both faces refuse with the same sentence, and apply has changed nothing."""
    policy = Checkpoint.from_flag(flag)
    with pytest.raises(PolicyError, match=sentence):
        policy.transform(recorded(job))
    if "later" in sentence:  # seen when it happens only
        return
    model = load_job(job).make_model()
    with pytest.raises(PolicyError, match=sentence):
        policy.apply(Job(model))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_operators_to_keep_must_exist_and_not_be_random():
    """A name that torch does not have, or an operator whose numbers cannot be drawn once only, is refused."""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PolicyError, match="has no operator"):
        Checkpoint(modules=("*",), keep=("aten.nothing.default",)).apply(Job(model))
    with pytest.raises(PolicyError, match="draws random numbers"):
        Checkpoint(modules=("*",), keep=("aten.native_dropout.default",)).apply(Job(model))


class Doubling(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.mul_(2))


def test_a_forward_that_changes_its_input_is_refused_when_it_does():
    """Its second run would start from what the first one left: the run ends before the numbers are wrong."""
    model = nn.Sequential(nn.Linear(4, 4), Doubling())
    Checkpoint(modules=("1",)).apply(Job(model))
    with pytest.raises(PolicyError, match="1 changes an input"):
        model(torch.ones(2, 4))


def test_in_place_activations_are_left_alone_with_a_note():
    """A pattern that takes them along still works on the others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    job = Job(model)
    Checkpoint(modules=("*",)).apply(job)
    assert "forward" in model[0].__dict__
    assert "forward" not in model[1].__dict__
    assert "skipped 1," in job.notes[0]


def test_running_statistics_move_once():
    """Statistics of every norm are those of the plain run, to the bit, also where the second run passes them."""
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(
                nn.Conv1d(3, 4, 3),
                nn.BatchNorm1d(4),
                nn.BatchNorm1d(4, momentum=None),
                nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
                nn.Tanh(),
            )
        )
        if checkpoints:
            Checkpoint(modules=("0", "0.*")).apply(Job(model))
        for _ in range(3):
            model(torch.randn(5, 3, 16)).square().sum().backward()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        found[-1].update({name: p.grad for name, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class _Keys:
    """A cache of keys, as generation uses it: a list of layers, which attention appends to."""

    def __init__(self) -> None:
        self.layers: list[dict[str, torch.Tensor]] = []
        self.seen = 0

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if layer == len(self.layers):
            self.layers.append({})
        before = self.layers[layer].get("keys")
        self.layers[layer]["keys"] = keys if before is None else torch.cat((before, keys), 1)
        return self.layers[layer]["keys"]


class _Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keys: _Keys) -> torch.Tensor:
        known = keys.update(self.layer, self.project(x))
        return x + torch.softmax(x @ known.transpose(1, 2), -1) @ known


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention(layer) for layer in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, _Keys]:
        keys = _Keys()
        for layer in self.layers:
            x = layer(x, keys)
        return x, keys


def test_a_cache_that_attention_appends_to_is_not_appended_to_twice():
    """The forward that runs again finds the cache as its first run did; what the job then holds is what it made."""

    def trained(policy: Checkpoint | None) -> tuple[list[torch.Tensor], _Keys]:
        torch.manual_seed(0)
        model = _Cached()
        if policy is not None:
            policy.apply(Job(model))
        result, keys = model(torch.randn(2, 4, 8))
        result.pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], keys

    plain, kept = trained(None)
    again, keys = trained(Checkpoint(modules=("layers.*",)))
    assert keys.seen == kept.seen == 2
    assert [layer["keys"].shape for layer in keys.layers] == [(2, 4, 8), (2, 4, 8)]
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda held: held.append(4), [1, 2, 3, 4]),
        (lambda held: held.pop(), [1, 2]),
        (lambda held: held.__setitem__(0, 5), [5, 2, 3]),
        (lambda held: held.insert(0, 0), [0, 1, 2, 3]),
        (lambda held: held.clear(), []),
    ],
    ids=["append", "pop", "replace", "insert", "clear"],
)
def test_changed_arguments_are_put_back_while_a_forward_runs_again(change, left):
    """Lists, dictionaries and attributes have their contents from before inside, and keep the later ones outside."""
    held, named, owner = [1, 2, 3], {"a": [1], "b": 2}, _Keys()
    owner.layers.append({"inner": (held,)})
    objects = Arguments([named, owner], ())
    change(held)
    named["a"], named["c"] = [2], 3
    del named["b"]
    owner.seen = 7
    objects.compare()
    later = dict(named)
    with objects.as_before():
        assert held == [1, 2, 3]
        assert named == {"a": [1], "b": 2}
        assert owner.seen == 0
        held.append(9)
    assert held == left
    assert named == later
    assert owner.seen == 7
