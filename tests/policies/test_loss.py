"""Chunked cross-entropy: the same loss and gradients, never a whole softmax, and an estimate within its bounds."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.loss.lazy import LazyLogits, lazy_logits
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.policies.faces import compare, faces, recorded, train
from tests.recorder.recorded import record

HEADS = {"gpt": "head", "lstm": "predict", "shared": "head"}
cross_entropy = F.cross_entropy  # as a script would import it, before any plan


def peak(step: Step) -> int:
    return int(live_bytes(step).during.max())


class Small(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=bias)

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.parametrize("text", ["eight", "1", "0,head", ""])
def test_bad_flag_is_refused_with_a_sentence(text):
    """An invalid flag is refused with a valid example."""
    with pytest.raises(PolicyError, match="write a"):
        ChunkedLoss.from_flag(text)


def test_flag():
    """--loss 8,lm_head means eight chunks and the layer lm_head."""
    assert ChunkedLoss.from_flag("8,lm_head") == ChunkedLoss(chunks=8, head="lm_head")
    assert ChunkedLoss.from_flag("4").describe() == "loss in 4 chunks"


@pytest.mark.parametrize(("name", "head"), [("gpt", ""), ("gpt", "head"), ("shared", "head"), ("lstm", "")])
def test_a_run_lies_within_the_bounds_of_the_estimate(name, head):
    """Policies that change lifetimes are predicted on the estimate."""
    plan = Plan((ChunkedLoss(4, head=head, minimum_bytes=0),))
    predicted, measured = faces(name, plan)
    predicted.check()
    bounds = interval_of(plan.policies, [recorded(name)], [predicted])
    assert bounds.least_bytes <= peak(measured) <= bounds.most_bytes, compare(predicted, measured)
    assert peak(predicted) < peak(recorded(name))
    for policy in (Checkpoint(modules=(".",)), Swap(modules=(".",), to="disk")):
        Plan((*plan.policies, policy)).transform(recorded(name)).check()


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_training_is_the_same_within_rounding(name, head):
    """Three steps give the plain run's losses and parameters within rounding: chunks are summed in another order."""
    plan = Plan((ChunkedLoss(4, head=HEADS[name] if head else "", minimum_bytes=0),))
    plain, changed = train(name), train(name, plan)
    assert changed.losses == pytest.approx(plain.losses, rel=1e-5)
    for key, gradient in plain.gradients.items():
        torch.testing.assert_close(changed.gradients[key], gradient, rtol=1e-3, atol=1e-5)


_ARGUMENTS = (
    ((37, 11), (5, 7, 4, 3)),
    ("indices", "probabilities"),
    (False, True),
    ("mean", "sum", "none"),
    (0.0, 0.1),
    (torch.float32, torch.bfloat16),
)
#: Every value of each argument with every value of each other: a third of all combinations.
_FORMS = [
    [values[number] for values, number in zip(_ARGUMENTS, numbers, strict=True)]
    for numbers in itertools.product(*(range(len(values)) for values in _ARGUMENTS))
    if sum(numbers) % 3 == 0
]


@pytest.mark.parametrize(("shape", "targets", "weighted", "reduction", "smoothing", "dtype"), _FORMS)
def test_every_form_of_cross_entropy(shape, targets, weighted, reduction, smoothing, dtype):
    """Weights, ignored targets, smoothing, probabilities and images have torch's own loss and gradient."""
    torch.manual_seed(0)
    logits = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.rand(shape[1]).to(dtype) if weighted else None
    target = torch.softmax(torch.randn(shape), 1).to(dtype)
    if targets == "indices":
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        target.view(-1)[::3] = -100
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}

    def run():
        loss = cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
        return loss, torch.autograd.grad(loss, logits, torch.ones_like(loss) * 0.7)[0]

    expected = run()
    job = Job(nn.Linear(2, 2))
    ChunkedLoss(4, minimum_bytes=0).apply(job)
    found = run()
    job.undo()
    assert "Chunked" in type(found[0].grad_fn).__name__
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        return 2 * ctx.saved_tensors[0] * upstream


def accuracy_first(context):
    """Returns a use that counts right answers without gradients before the loss is computed, as many loops do."""

    def use(logits, targets):
        logits, targets = logits.flatten(0, 1), targets.flatten()
        with context():
            assert 0 <= int((logits.argmax(-1) == targets).sum()) <= len(targets)
        return F.cross_entropy(logits, targets)

    return use


USES = {
    "accuracy first": accuracy_first(torch.no_grad),
    "accuracy in inference mode": accuracy_first(torch.inference_mode),
    "flattened": lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten()),
    "shifted": lambda logits, t: F.cross_entropy(
        logits.float()[..., :-1, :].contiguous().view(-1, 50), t[:, 1:].reshape(-1)
    ),
    "transposed": lambda logits, t: F.cross_entropy(logits.transpose(1, 2), t),
    "looked at": lambda logits, t: (
        F.cross_entropy(logits.view(-1, 50), t.view(-1)) + 0 * (logits.argmax(-1) == t).float().mean()
    ),
    "another loss": lambda logits, t: F.nll_loss(
        torch.log_softmax(logits.reshape(-1, logits.size(-1)), -1), t.view(-1)
    ),
    "own function": lambda logits, t: Square.apply(logits).mean(),
    "arithmetic": lambda logits, t: F.cross_entropy((logits * 2 + 1).flatten(0, 1), t.flatten()),
    "module": lambda logits, t: nn.CrossEntropyLoss()(logits.view(-1, 50), t.view(-1)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use", USES)
def test_lazy_logits_serve_whatever_touches_them(use, autocast):
    """Logits that are not made yet give every use its right value and gradient, under autocast, too."""
    torch.manual_seed(0)
    model, ids, targets = Small(), torch.randint(50, (4, 9)), torch.randint(50, (4, 9))
    tolerance = {"rtol": 3e-2, "atol": 3e-3} if autocast else {"rtol": 1e-4, "atol": 1e-6}

    def run():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = USES[use](model(ids), targets)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = run()
    job = Job(model)
    ChunkedLoss(4, head="head", minimum_bytes=0).apply(job)
    found = run()
    job.undo()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_lazy_logits_have_the_type_that_autocast_gives(dtype, bias):
    """Before they are made and after; without autocast they keep the layer's type. Equal to the Linear's own."""
    layer, hidden = nn.Linear(4, 6, bias=bias), torch.randn(3, 4)
    assert lazy_logits(layer, hidden, nullcontext).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        lazy, plain = lazy_logits(layer, hidden, nullcontext), layer(hidden)
    assert lazy.dtype == plain.dtype == dtype
    assert lazy.hidden.dtype == lazy.matrix.dtype == dtype
    assert torch.equal(lazy + 0, plain + 0)


def test_autograd_takes_lazy_logits_as_roots():
    """torch.autograd gets the graph of logits that are not made, as reentrant checkpointing passes it."""
    torch.manual_seed(0)
    model, ids = Small(), torch.randint(50, (4, 9))
    upstream = torch.randn(4, 9, 50)
    torch.autograd.backward([model(ids)], [upstream])
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    job = Job(model)
    ChunkedLoss(4, head="head", minimum_bytes=0).apply(job)
    logits = model(ids)
    with torch.no_grad():
        torch.autograd.backward([logits], [upstream], retain_graph=True)
    found = torch.autograd.grad([logits], list(model.parameters()), [upstream])
    job.undo()
    assert logits.made is None
    for parameter, one, other in zip(model.parameters(), found, expected, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(parameter.grad, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("modules", [".", "**"])
def test_a_checkpoint_around_the_head_saves_the_same_again(modules, bias):
    """The recompute of a region with the head in it makes lazy logits, too: the numbers are those of the loss alone."""
    ids, targets = torch.randint(50, (4, 9)), torch.randint(50, (4, 9))
    loss = ChunkedLoss(4, head="head", minimum_bytes=1)
    found = []
    for policies in ((loss,), (loss, Checkpoint(modules=(modules,)))):
        torch.manual_seed(0)
        model = Small(bias=bias)
        job = Job(model)
        Plan(policies).apply(job)
        value = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        value.backward()
        job.undo()
        found.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_head_called_with_another_type_computes_its_logits_at_once():
    """Under pure-bf16 a script that calls the head itself passes float32: precision casts it, and a note says so."""
    torch.manual_seed(0)
    model, hidden, targets = Small(), torch.randn(36, 16), torch.randint(50, (36,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = F.cross_entropy(model.head(hidden), targets)
    job = Job(model, [optimizer])
    Plan((Precision("bf16", "bf16"), ChunkedLoss(4, head="head", minimum_bytes=0))).apply(job)
    found = F.cross_entropy(model.head(hidden), targets)
    found.backward()
    notes = list(job.notes)
    job.undo()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)
    assert model.head.weight.grad.abs().sum() > 0
    assert (
        "loss: logits are computed at once where the head is called with torch.float32 and has torch.bfloat16." in notes
    )


def test_logits_are_whole_without_gradients():
    """In evaluation the model returns plain logits."""
    model = Small()
    job = Job(model)
    ChunkedLoss(4, head="head", minimum_bytes=0).apply(job)
    ids = torch.randint(50, (4, 9))
    assert type(model(ids)) is LazyLogits
    with torch.no_grad():
        assert type(model(ids)) is torch.Tensor
    job.undo()


def test_undo_restores():
    """After undo cross-entropy and the head are torch's own, also for who imported the function before."""
    code, model = F.cross_entropy.__code__, Small()
    job = Job(model)
    ChunkedLoss(4, head="head").apply(job)
    assert F.cross_entropy.__code__ is not code
    job.undo()
    assert F.cross_entropy.__code__ is code
    assert "forward" not in model.head.__dict__


def test_small_and_unknown_calls_are_torchs_own():
    """Small logits are left alone silently, calls it does not know with a note."""
    job = Job(Small())
    ChunkedLoss(4, minimum_bytes=100).apply(job)
    small = F.cross_entropy(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]))
    assert "Chunked" not in type(small.grad_fn).__name__
    assert not job.notes
    soft = torch.softmax(torch.randn(8, 9), 1).requires_grad_()
    F.cross_entropy(torch.randn(8, 9, requires_grad=True), soft).backward()
    job.undo()
    assert job.notes == ["loss: a cross-entropy is not computed in chunks: its targets or weights need gradients."]


def test_head_that_is_no_linear_is_refused():
    """Naming a module that makes no logits is refused before anything is changed."""
    model, code = Small(), F.cross_entropy.__code__
    with pytest.raises(PolicyError, match="is a Embedding, not a Linear"):
        ChunkedLoss(4, head="embed").apply(Job(model))
    with pytest.raises(PolicyError, match="no module of the model matches 'hed'; did you mean head"):
        ChunkedLoss(4, head="hed").apply(Job(model))
    assert F.cross_entropy.__code__ is code


def test_step_without_large_logits_is_refused():
    """A step with small logits has nothing to gain, and the message says so."""
    with pytest.raises(PolicyError, match="no cross_entropy trains on 1,048,576 bytes of logits"):
        ChunkedLoss(4).transform(recorded("lstm"))
    with pytest.raises(PolicyError, match="makes no logits"):
        ChunkedLoss(4, head="layers.0", minimum_bytes=0).transform(recorded("lstm"))


_CAUSAL_LM = """
import contextlib, sys
import torch
from torch import nn
from torch.nn import functional as F

class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.lm_head = nn.Linear(32, 2000, bias=False)
        self.lm_head.weight.requires_grad = "frozen" not in sys.argv

    def forward(self, ids):  # shifts, casts and returns its logits, as causal language models of transformers do
        hidden = self.body(self.embed(ids))
        logits = self.lm_head(hidden[:, slice(0, None), :])
        labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        loss = F.cross_entropy(logits.float().view(-1, 2000), labels, ignore_index=-100, reduction="sum") / 500
        return {"loss": loss, "logits": logits}

torch.manual_seed(0)
torch.set_num_threads(1)
model = CausalLM()
if "bf16" in sys.argv:
    model = model.bfloat16()
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
for step in range(6):
    ids = torch.randint(2000, (4, 128))
    casts = torch.autocast("cpu", torch.bfloat16) if "autocast" in sys.argv else contextlib.nullcontext()
    with casts:
        loss = model(ids)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("types", ["fp32", "bf16", "autocast"])
def test_a_head_inside_a_model_that_casts_its_logits(tmp_path, types, head):
    """Its logits are never whole where the model computes the loss itself; a search proposes the head by name."""
    (tmp_path / "job.py").write_text(_CAUSAL_LM)
    step = record(tmp_path, "job.py", types, head).step
    assert "lm_head" in {policy.head for policy in ChunkedLoss.candidates(step).whole_step}
    under = record(tmp_path, "--loss", "8,lm_head", "job.py", types, head, name="under.memprof")
    assert under.peak < 0.6 * peak(step)
