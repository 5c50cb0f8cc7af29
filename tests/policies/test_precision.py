"""The precision policy: estimates hold within their bounds, and training is the same up to rounding."""

from __future__ import annotations

import dataclasses
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.machines.catalogue import find_machine
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from tests.policies.faces import record_step, recorded, train, trained
from tests.policies.small_jobs import record, supervised
from tests.recorder.recorded import record_script

BF16, FP16, PURE = Precision("bf16"), Precision("fp16"), Precision("bf16", "bf16")


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


# Settings


def test_short_forms_name_their_settings():
    """--precision bf16, fp16 and pure-bf16 are the three things that can be asked for."""
    assert Precision.from_flag("bf16") == BF16
    assert Precision.from_flag("fp16") == FP16
    assert Precision.from_flag("pure-bf16") == PURE
    assert [policy.describe() for policy in (BF16, FP16, PURE)] == [
        "precision bf16",
        "precision fp16",
        "precision pure-bf16",
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, "write 'bf16' or 'fp16'"),
        ({"weights": "fp8"}, "write 'fp32' or 'bf16'"),
        ({"dtype": "fp16", "weights": "bf16"}, "write dtype = 'bf16'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    """A wrong setting is refused when the policy is made, with what to write instead."""
    with pytest.raises(PolicyError, match=sentence):
        Precision(**settings)


def test_unknown_flag_lists_those_known():
    """A flag that is none of the short forms is answered with all of them."""
    with pytest.raises(PolicyError, match="write one of bf16, fp16, pure-bf16"):
        Precision.from_flag("half")


# The prediction


def test_model_without_float32_weights_is_not_predicted():
    """A step recorded in the short type has nothing left to shorten, and the prediction says so."""
    for policy in (BF16, PURE):
        with pytest.raises(PolicyError, match="already computes in bfloat16"):
            PURE.transform(policy.transform(recorded("shared")))
    storages = recorded("shared").storages
    float64 = storages.replace(dtype=np.where(storages.dtype == "float32", "float64", storages.dtype))
    with pytest.raises(PolicyError, match="no model with float32 parameters"):
        BF16.transform(dataclasses.replace(recorded("shared"), storages=float64))


@pytest.mark.parametrize(("job", "policy"), [("gpt", BF16), ("resnet", PURE), ("shared", FP16)], ids=str)
def test_measured_peak_is_within_the_stated_bounds(job, policy):
    """The estimate is made from the plain recording alone, and other policies are predicted on it."""
    step, plan = recorded(job), Plan((policy,))
    bounds = plan.predict(step)[0].prediction.interval
    measured = live_bytes(record_step(job, plan)).during.max()
    assert bounds.least_bytes <= measured <= bounds.most_bytes
    for other in (Checkpoint(("*",)), Swap(("*",), to="disk")):
        other.transform(policy.transform(step)).check()


def test_autocast_copies_each_weight_once(tmp_path):
    """By hand: forward casts the weights of two layers of 64 by 64, of which backward needs the second.

    The norm between them is no product: its weight is not cast, and what it makes is halved.
    """
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
    step = record(lambda: supervised(model, (8, 64), torch.optim.Adam), tmp_path)
    under = BF16.transform(step)
    ops, storages = under.ops, under.storages
    casts = np.flatnonzero(ops.name == "aten._to_copy.default")
    made = storages.take(np.isin(storages.created_op_id, casts))
    assert ops.phase[casts].tolist() == ["forward", "forward"]
    assert made.requested_bytes.tolist() == [8192, 8192]
    assert made.dtype.tolist() == ["bfloat16", "bfloat16"]
    assert ops.phase[made.freed_op_id].tolist() == ["forward", "backward"]
    for category in ("parameter", "optimizer_state", "gradient"):
        sizes = [one.storages.allocated_bytes[one.storages.category == category].sum() for one in (step, under)]
        assert sizes[0] == sizes[1], category
    norm = np.flatnonzero(ops.name == "aten.native_layer_norm.default")
    assert set(storages.dtype[storages.created_op_id == norm[0]]) == {"bfloat16"}


def test_a_gpu_without_bfloat16_is_offered_fp16():
    """T4 and V100 compute in float16 only; bf16 is refused for them, wherever the job was recorded."""
    step = recorded("gpt")
    storages = step.storages.replace(device=np.full(len(step.storages), "cuda:0", dtype=np.object_))
    for name, offered in (("t4", "fp16"), ("V100 PCIe 16GB", "fp16"), ("rtx3090", "bf16")):
        types = find_machine(name).short_types
        on_card = dataclasses.replace(step, storages=storages, short_types=types)
        for one in (on_card, dataclasses.replace(step, planned_types=types)):
            assert Precision.candidates(one).whole_step == (Precision(offered),)
            if offered == "fp16":
                with pytest.raises(PolicyError, match="does not support bf16"):
                    Precision("bf16").transform(one)


# Real training


@pytest.mark.parametrize(
    ("job", "policy", "tolerance"),
    [
        ("shared", BF16, 0.01),
        ("shared", FP16, 0.01),
        ("shared", PURE, 0.02),
        ("lstm", BF16, 0.01),
        ("resnet", BF16, 0.05),
    ],
    ids=lambda value: value.describe() if isinstance(value, Precision) else str(value),
)
def test_losses_stay_within_rounding(job, policy, tolerance):
    """After three steps the losses are within the tolerance, relative to the plain run's."""
    plain, changed = trained(job), train(job, Plan((policy,)))
    assert np.allclose(plain.losses, changed.losses, rtol=tolerance), (plain.losses, changed.losses)


def test_gradients_are_those_of_plain_training():
    """fp16 scaling is not seen from outside: gradients agree with float32's within fp16's rounding."""
    plain, scaled = train("shared", steps=1), train("shared", Plan((FP16,)), steps=1)
    for name, gradient in plain.gradients.items():
        difference = (scaled.gradients[name] - gradient).norm() / gradient.norm()
        assert scaled.gradients[name].dtype == torch.float32
        assert difference < 0.01, name


class Both(NamedTuple):
    logits: torch.Tensor
    count: torch.Tensor


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    name: str


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale):
        y = self.linear(x) * scale
        return {"both": Both(y, torch.arange(3)), "list": [y, None, 2.5], "answer": Answer(y, "a")}


@pytest.mark.parametrize("policy", [BF16, FP16, PURE], ids=Precision.describe)
@pytest.mark.parametrize("mode", ["training", "eval", "no_grad"])
def test_outputs_of_any_shape_come_back_in_float32(policy, mode):
    """What a model returns, nested in whatever, is float32 as before; all else is the same."""
    model = Nested()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    policy.apply(job)
    model.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        out = model(torch.randn(2, 4), scale=2.0)
    assert isinstance(out["both"], Both)
    assert isinstance(out["answer"], Answer)
    assert {out["both"].logits.dtype, out["list"][0].dtype, out["answer"].logits.dtype} == {torch.float32}
    assert out["both"].count.dtype == torch.int64
    assert out["list"][1:] == [None, 2.5]
    assert out["answer"].name == "a"


class Recurrent(nn.Module):
    """Mixes a hidden state with new values in ``lerp``, which takes operands of one type alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, hidden=None):
        new = self.linear(x)
        hidden = new if hidden is None else torch.lerp(hidden, new, new.sigmoid())
        return hidden, [hidden]


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_states_passed_back_have_the_type_they_had(mode):
    """A model that generates gets its states back as autocast alone would pass them, to the bit."""
    torch.manual_seed(0)
    model, inputs = Recurrent().train(mode != "eval"), torch.randn(2, 4)
    with torch.set_grad_enabled(mode != "no_grad"):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(inputs, model(inputs)[0])[0]
        BF16.apply(Job(model))
        first, states = model(inputs)
        second, _ = model(inputs, states[0])
    assert first.dtype == second.dtype == torch.float32
    assert torch.equal(second, wanted.float())


class Seen(nn.Module):
    """Notes the argument that reaches it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.argument = x
        return self.linear(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_changed_in_place_keep_their_new_values(mode):
    """What a job writes into a result before passing it back is not rounded to the type the result had."""
    model = Seen().eval()
    BF16.apply(Job(model))
    with mode():
        out = model(torch.randn(2, 4))
        model(out)
        assert model.argument.dtype == torch.bfloat16
        assert torch.equal(model.argument.float(), out)
    with torch.no_grad():
        out = model(torch.randn(2, 4))
        out[:, 0].fill_(1 + 2**-12)
        model(out)
    assert model.argument is out


_INDICES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        y = self.linear(x)
        rows = MADE
        return y.index_select(0, rows).sum()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    model(torch.randn(400, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_indices_that_would_be_rounded_are_refused(tmp_path):
    """Integers in the type of an activation and back are other integers in bfloat16: a plan would compute others."""
    kept = record_script(tmp_path, _INDICES.replace("MADE", "torch.arange(399, -1, -1)")).step
    assert live_bytes(BF16.transform(kept)).during.max() > 0
    cast = record_script(tmp_path, _INDICES.replace("MADE", "y.new_tensor(torch.arange(399, -1, -1)).long()")).step
    with pytest.raises(PolicyError, match="those above 256 would be rounded"):
        BF16.transform(cast)


@pytest.mark.parametrize("policy", [BF16, FP16, PURE], ids=Precision.describe)
def test_undo_restores_the_model(policy):
    """Undone before a step, the job is what it was: values, types, objects, and the optimizer's step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = list(model.parameters())
    job = Job(model, [optimizer])
    policy.apply(job)
    job.undo()
    assert "forward" not in model.__dict__
    assert "step" not in optimizer.__dict__
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


def test_pure_keeps_an_optimizer_that_has_state():
    """An optimizer made and used before goes on with the same parameters, its moments short like them."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    PURE.apply(Job(model, [optimizer]))
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert model[0].weight.dtype == model[0].weight.grad.dtype == state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].item() == 2
    assert state["step"].dtype == torch.float32


# Loss scaling


def scaled_job():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, [optimizer])
    FP16.apply(job)
    return model, optimizer


def test_step_that_overflows_is_skipped():
    """Gradients that overflow change nothing, the next step trains again, and the scheduler is content."""
    model, optimizer = scaled_job()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 8)).sum().mul(float("inf")).backward()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_small_gradients_survive_scaling():
    """A gradient below fp16's smallest number reaches the parameter, as it does in float32."""
    model, _ = scaled_job()
    x = torch.randn(4, 8, requires_grad=True)
    (model(x).sum() * 1e-7).backward()
    plain = small_model()
    y = x.detach().clone().requires_grad_()
    (plain(y).sum() * 1e-7).backward()
    for scaled, exact in ((model[0].weight.grad, plain[0].weight.grad), (x.grad, y.grad)):
        assert (scaled - exact).norm() < 0.01 * exact.norm()


def test_backward_past_the_model_is_not_scaled():
    """A penalty on the weights alone, which never passes the model's outputs, has its own gradient."""
    model, _ = scaled_job()
    model[0].weight.pow(2).sum().backward()
    assert torch.equal(model[0].weight.grad, 2 * model[0].weight)


# Refusals


@pytest.mark.parametrize(
    ("make", "optimizer", "policy", "sentence"),
    [
        (nn.ReLU, None, BF16, "no float32 parameters"),
        (lambda: nn.Linear(2, 2).bfloat16(), None, PURE, "no float32 parameters"),
        (lambda: nn.LSTM(2, 2), None, FP16, "cannot train recurrent layers in fp16 on a CPU"),
        (lambda: nn.Linear(2, 2), torch.optim.LBFGS, FP16, "LBFGS runs the model several times"),
    ],
)
def test_what_cannot_be_done_is_refused(make, optimizer, policy, sentence):
    """An unsupported job is refused with a message, and left unchanged."""
    model = make()
    optimizers = [optimizer(model.parameters())] if optimizer else []
    dtypes = {p.dtype for p in model.parameters()}
    with pytest.raises(PolicyError, match=sentence):
        policy.apply(Job(model, optimizers))
    assert "forward" not in model.__dict__
    assert {p.dtype for p in model.parameters()} == dtypes


def test_a_loss_that_the_model_returns_may_be_changed_in_place() -> None:
    """A model that returns its loss in float32 trains under fp16 when the job divides that in place, as trainers do."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.linear(x).float(), torch.tensor([0, 1]))

    def gradient(plan: Plan) -> torch.Tensor:
        torch.manual_seed(0)
        model = Returning()
        job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        plan.apply(job)
        loss = model(torch.ones(2, 4))
        loss /= 2
        loss.backward()
        job.undo()
        return model.linear.weight.grad

    torch.testing.assert_close(gradient(Plan((FP16,))), gradient(Plan(())), rtol=1e-2, atol=1e-3)


# Models that are more than layers


class Returning(nn.Module):
    """Keeps a table that is a view."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)
        self.register_buffer("table", torch.randn(1, 64, 32).transpose(0, 1))

    def forward(self, words):
        hidden = self.norm(self.embedding(words) + self.table[: words.shape[1], 0])
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.view(-1, 64), words.view(-1))


def test_pure_is_part_of_an_exported_program():
    """torch.export traces the casts around a model whose weights are bfloat16: it takes and returns float32."""
    model, inputs = small_model(), torch.randn(4, 8)
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    PURE.apply(job)
    expected = model(inputs)
    program = torch.export.export(model.eval(), (inputs,))
    found = program.module()(inputs)
    job.undo()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_pure_frees_what_a_buffer_was_a_view_of():
    """As ``Module.to`` does; undone before a step, the buffer is the view that it was."""
    model = Returning()
    view = model.table
    job = Job(model, [torch.optim.AdamW(model.parameters())])
    PURE.apply(job)
    assert model.table.dtype == torch.bfloat16
    assert not model.table._is_view()
    job.undo()
    assert model.table is view
    PURE.apply(job)
    model(torch.zeros(2, 3, dtype=torch.long))
    base = weakref.ref(view._base)
    del view
    assert base() is None
