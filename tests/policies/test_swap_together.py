"""Swapped parameters together with policies that read them at other times, and what may never be written to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.absent import AbsentTensor
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.policies.faces import Trained, compare, faces, train, trained

LOSS = ChunkedLoss(4, head="head", minimum_bytes=1)


def parameters(*modules: str) -> Swap:
    return Swap(modules=modules, what="parameters", to="disk", minimum_bytes=1 << 10)


def peak(step: Step) -> int:
    return int(live_bytes(step).during.max())


def assert_same(expected: Trained, found: Trained) -> None:
    assert expected.losses == found.losses
    for one, other in ((expected.state, found.state), (expected.gradients, found.gradients)):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]), key


class Deep(nn.Module):
    """Three layers, of which the job may checkpoint each."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the last layer makes."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            x = torch.tanh(x)
        return x


def planned(model: nn.Module, optimizer: torch.optim.Optimizer, *policies: Policy) -> Job:
    job = Job(model, [optimizer])
    Plan(policies).apply(job)
    return job


#: Patterns of checkpoint and of swap: regions inside those of swap, the same, and around them.
REGIONS = [
    ("layers.*.mlp", "layers.*"),
    ("layers.*", "layers.*"),
    ("layers.*", "**"),
    (".", "**"),
]


@pytest.mark.parametrize(("regions", "swapped"), REGIONS)
def test_a_recompute_reads_parameters_that_are_in(regions: str, swapped: str) -> None:
    """Training is that of the plain run to the bit, whichever of checkpoint and swap is around the other."""
    assert_same(trained("gpt"), train("gpt", Plan((Checkpoint(modules=(regions,)), parameters(swapped)))))


@pytest.mark.parametrize(("regions", "swapped"), REGIONS)
def test_a_recompute_of_moved_parameters_is_measured_as_predicted(regions: str, swapped: str) -> None:
    """Parameters that a recompute reads are in until backward has read what it saved: the peak is exact."""
    predicted, measured = faces("gpt", Plan((Checkpoint(modules=(regions,)), parameters(swapped))))
    assert peak(predicted) == peak(measured), compare(predicted, measured)


def test_a_recompute_keeps_frozen_parameters_in() -> None:
    """A checkpoint keeps what needs no gradient as it is, not detached: it must not leave before backward reads it."""
    found = []
    for policies in ((), (Checkpoint(modules=("layers.*",)), parameters("**"))):
        torch.manual_seed(0)
        model, inputs = Deep(), torch.randn(4, 16)
        model.layers[1:].requires_grad_(False)
        optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
        job = planned(model, optimizer, *policies)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
        job.undo()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("others", [(), (Checkpoint(modules=(".",)),)], ids=["alone", "checkpointed"])
def test_a_head_in_chunks_reads_its_parameters_after_its_forward(others: tuple[Checkpoint, ...]) -> None:
    """The loss reads the head's matrix when its module has returned: numbers are those of the loss without swap."""
    assert_same(train("gpt", Plan((LOSS, *others))), train("gpt", Plan((LOSS, *others, parameters("**")))))


def test_a_head_in_chunks_and_out_is_measured_as_predicted() -> None:
    """The peak is within 1 % of the predicted one."""
    predicted, measured = faces("gpt", Plan((LOSS, parameters("**"))))
    assert abs(peak(predicted) - peak(measured)) <= 0.01 * peak(measured), compare(predicted, measured)


@pytest.mark.parametrize("modules", [".", "**"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_modules_called_inside_the_chosen_one_bring_their_parameters_in(modules: str, checkpoints: bool) -> None:
    """The job's own checkpoint runs a layer again without the model around it, and a script calls one by itself."""
    found = []
    for policies in ((), (Swap(modules=(modules,), what="parameters", to="disk", minimum_bytes=1),)):
        torch.manual_seed(0)
        model, inputs = Deep(checkpoints=checkpoints), torch.randn(4, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = planned(model, optimizer, *policies)
        losses = []
        for _ in range(3):
            loss = model(inputs).square().mean() + model.layers[1](inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        job.undo()
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_made_from_a_weight_that_is_out_has_its_values(
    kind: type[torch.optim.Optimizer], fused: bool
) -> None:
    """The read brings the weight back; both share memory, as in a plain run, and torch's fused update is right, too."""

    def updated(*policies: Policy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = planned(model, optimizer, *policies)
        train_once(model, optimizer)
        made = nn.Parameter(model.layers[0].weight.data)
        made.grad = torch.ones(16, 16)
        kind([made], lr=0.1, fused=fused).step()  # type: ignore[call-arg]
        train_once(model, optimizer)
        job.undo()
        return [made.detach(), *(each.detach() for each in model.parameters())]

    plain, swapped = updated(), updated(Swap(modules=("**",), what="parameters", to="disk", minimum_bytes=1))
    assert all(torch.equal(*pair) for pair in zip(plain, swapped, strict=True))


def test_a_parameter_that_is_given_anothers_memory_has_its_values() -> None:
    """``a.data = b.data`` while b is out brings b back, and both are trained as without a plan."""

    def updated(*policies: Policy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        job = planned(model, optimizer, *policies)
        train_once(model, optimizer)
        first, second = list(model.parameters())[0::2][:2]
        model.layers[1](torch.randn(4, 16)).detach_()
        first.data = second.data
        train_once(model, optimizer)
        job.undo()
        return [each.detach() for each in model.parameters()]

    plain, swapped = updated(), updated(Swap(modules=("**",), what="parameters", to="disk", minimum_bytes=1))
    assert all(torch.equal(*pair) for pair in zip(plain, swapped, strict=True))


def test_another_optimizer_reads_state_that_is_out() -> None:
    """Its update brings the state in, and updates as without a plan."""

    def updated(*policies: Policy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        job = planned(model, optimizer, *policies)
        train_once(model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        other.state = optimizer.state
        model(torch.randn(4, 16)).square().mean().backward()
        other.step()
        optimizer.step()
        job.undo()
        return [each.detach() for each in model.parameters()]

    plain, swapped = updated(), updated(Swap(what="optimizer", to="disk", minimum_bytes=1))
    assert all(torch.equal(*pair) for pair in zip(plain, swapped, strict=True))


def test_two_jobs_do_not_refuse_each_others_updates() -> None:
    """Values that another plan has moved out are brought in by that plan."""
    settings = ({"what": "parameters", "modules": ("**",)}, {"what": "optimizer"})
    jobs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters())
        policies = [Swap(to="disk", minimum_bytes=1, **each) for each in settings]  # type: ignore[arg-type]
        jobs.append((model, optimizer, planned(model, optimizer, *policies)))
    for model, optimizer, _ in (*jobs, *jobs):
        train_once(model, optimizer)
    for model, _, job in jobs:
        job.undo()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_state_of_both_models_of_one_optimizer_is_moved() -> None:
    """Two models under one optimizer, each a job of its own: what a plan names is moved of both, and comes back."""
    models = Deep(), Deep()
    optimizer = torch.optim.AdamW([each for model in models for each in model.parameters()])
    policy = Swap(modules=("layers.1",), what="optimizer", to="disk", minimum_bytes=1)
    jobs = [planned(model, optimizer, policy) for model in models]

    def moved(model: nn.Module) -> list[str]:
        names = []
        for name, each in model.named_parameters():
            if isinstance(optimizer.state[each]["exp_avg"], AbsentTensor):
                names.append(name)
        return names

    def train_both() -> None:
        for model in models:
            model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()

    train_both()
    assert [moved(model) for model in models] == [["layers.1.weight", "layers.1.bias"]] * 2
    jobs[1].undo()
    train_both()
    assert [len(moved(model)) for model in models] == [2, 0]
    jobs[0].undo()
    assert not any(moved(model) for model in models)


def test_a_parametrization_takes_the_values_of_a_weight_that_is_out() -> None:
    """weight_norm after the first step computes its norms from the weight, not from NaN."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = planned(model, optimizer, Swap(modules=("**",), what="parameters", to="disk", minimum_bytes=1))
    train_once(model, optimizer)
    nn.utils.parametrizations.weight_norm(model.layers[1])
    norms = model.layers[1].parametrizations.weight.original0
    job.undo()
    assert norms.isfinite().all()
    assert model.layers[1].weight.isfinite().all()
