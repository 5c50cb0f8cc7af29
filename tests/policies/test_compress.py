from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.apply import from_eight_bits, to_eight_bits
from memprof.policies.compress.policy import BLOCK, CHUNK, Compress
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from tests.policies.faces import compare, peaks, record_step, recorded, train

#: The largest relative difference of a loss over eight steps that is promised.
LOSS_TOLERANCE = 0.02


# -- settings ---------------------------------------------------------------------------------------------------


def test_refuses_settings_without_sense():
    """Empty patterns and negative sizes are refused with a valid example."""
    with pytest.raises(PolicyError, match="patterns"):
        Compress(modules=())
    with pytest.raises(PolicyError, match="minimum_bytes = 4096"):
        Compress(minimum_bytes=-1)


def test_says_that_it_is_approximate():
    """The plan and its application both report that numerics change."""
    assert Compress.numerics == "approximate"
    assert Compress(modules=("layers.*",)).describe() == "compress what layers.* save to 8 bits"
    job = Job(nn.Linear(4, 4))
    Compress().apply(job)
    assert "approximate" in job.notes[0]
    job.undo()


# -- the eight bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, CHUNK + BLOCK + 1])
def test_no_value_is_off_by_more_than_half_a_code(dtype, length):
    """Each value comes back within half of its block's largest value / 127, besides the type's own rounding."""
    torch.manual_seed(0)
    values = (torch.randn(length) * torch.logspace(-3, 3, length)).to(dtype)
    codes, scales = to_eight_bits(values)
    assert codes.nbytes == length
    assert scales.nbytes == 4 * -(-length // BLOCK)
    back = torch.empty_like(values)
    from_eight_bits(codes, scales, back)
    whole = nn.functional.pad(values.double(), (0, -length % BLOCK)).view(-1, BLOCK)
    largest = whole.abs().amax(1, keepdim=True).expand_as(whole).flatten()[:length]
    rounding = 2 * torch.finfo(dtype).eps
    assert ((back.double() - values.double()).abs() <= largest * (0.5 / 127 * 1.001 + rounding)).all()


def test_zeros_and_masks_come_back_as_they_were():
    """Zeros stay zeros, and a dropout mask, of two values only, is exact to rounding."""
    mask = (torch.rand(4 * BLOCK) < 0.5).float() / 0.9
    for values in (torch.zeros(BLOCK), mask):
        packed = to_eight_bits(values)
        back = torch.empty_like(values)
        from_eight_bits(*packed, back)
        torch.testing.assert_close(back, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_packed(bad):
    """No scale holds infinities: such a tensor is kept as it is."""
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    assert to_eight_bits(values) is None


# -- the two faces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "patterns"), [("gpt", ("layers.*",)), ("unet", ("down.*",)), ("vit", ("**",))])
def test_estimate_is_within_its_bounds(name, patterns):
    """A quarter of what is saved, with a scale for each block, is about what a run has in memory."""
    policy = Compress(modules=patterns)
    step, measured = recorded(name), record_step(name, Plan((policy,)))
    bounds = interval_of((policy,), (step,), (policy.transform(step),))
    assert bounds.least_bytes <= peaks(measured)[0] <= bounds.most_bytes, compare(policy.transform(step), measured)
    assert bounds.most_bytes < peaks(step)[0]


def test_estimate_is_changed_by_other_policies():
    """Checkpoint and swap take other modules' tensors: the peak is lower than with one of them alone."""
    compressed, step = Compress(modules=("layers.[2-9]",)), recorded("gpt")
    for policy in (Checkpoint(("layers.[0-1]",)), Swap(("layers.[0-1]",), to="disk")):
        both = Plan((compressed, policy)).transform(step)
        both.check()
        assert peaks(both)[0] < min(peaks(one.transform(step))[0] for one in (compressed, policy))


def test_packed_tensors_are_of_a_byte_a_number():
    """Each is packed by an operator of its own, and the step does not contradict itself."""
    step = recorded("gpt")
    changed = Compress(modules=("layers.*",)).transform(step)
    changed.check()
    packed = changed.ops.name == "memprof.compress"
    assert packed.sum() == (changed.storages.dtype == "int8").sum() > 0


# -- training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "vit"])
def test_the_loss_curve_stays_within_tolerance(name):
    """Over eight steps no loss differs by more than 2 % from the plain run's; the first is equal."""
    plain = train(name, steps=8)
    packed = train(name, Plan((Compress(),)), steps=8)
    assert packed.losses[0] == plain.losses[0]
    np.testing.assert_allclose(packed.losses, plain.losses, rtol=LOSS_TOLERANCE)
    assert packed.losses != plain.losses


def test_gradients_are_close_and_parameters_exact():
    """A linear layer's weight gradient is off by the rounding of its input; the input's, by nothing."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    x = torch.randn(128, 64, requires_grad=True)
    gradients = []
    for policy in (None, Compress(minimum_bytes=0)):
        job = Job(layer)
        if policy is not None:
            policy.apply(job)
        layer.zero_grad()
        x.grad = None
        layer(x).square().sum().backward()
        gradients.append((x.grad.clone(), layer[1].weight.grad.clone()))
        job.undo()
    (plain_x, plain_weight), (packed_x, packed_weight) = gradients
    assert torch.equal(plain_x, packed_x)
    assert not torch.equal(plain_weight, packed_weight)
    assert (plain_weight - packed_weight).norm() < 0.01 * plain_weight.norm()


def test_integers_and_views():
    """Integer tensors are left alone, and views of one storage share what comes back."""
    shares = []

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x[:2], x[2:].t(), torch.arange(2048))
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            top, rest, numbers = ctx.saved_tensors
            shares.append(top.untyped_storage()._cdata == rest.untyped_storage()._cdata)
            shares.append(torch.equal(numbers, torch.arange(2048)))
            return grad * torch.cat([top, rest.t()])

    class Model(nn.Module):
        def forward(self, x):
            return Views.apply(x * 1)

    model = Model()
    job = Job(model)
    Compress(minimum_bytes=0).apply(job)
    x = torch.randn(8, 512, requires_grad=True)
    model(x).backward()
    job.undo()
    assert shares == [True, True]
    assert (x.grad - x.detach()).abs().max() <= x.detach().abs().max() / 254 * 1.001


# -- refusals and undoing ---------------------------------------------------------------------------------------


def test_refuses_a_pattern_without_a_match():
    """Both faces name what is near, and the model stays as it was."""
    with pytest.raises(PolicyError, match=r"did you mean .*layers"):
        Compress(modules=("layer.*",)).transform(recorded("gpt"))
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PolicyError, match="no module"):
        Compress(modules=("layers.*",)).apply(Job(model))
    assert "forward" not in vars(model)
