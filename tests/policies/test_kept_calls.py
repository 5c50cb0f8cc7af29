"""Checkpoints that keep single calls of operators, and several checkpoints in one plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.errors import PolicyError
from memprof.policies.checkpoint.kept_sets import kept_sets
from memprof.policies.checkpoint.kinds import kept_operators, spell_calls
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from tests.policies.faces import peaks, record_step, recorded, train
from tests.policies.small_jobs import peak, record, supervised

#: Job and the flags of its checkpoints.
CASES = (
    ("gpt", ("layers.* keep=attention,aten.addmm.default#1+3",)),
    ("gpt", ("layers.0 keep=attention", "layers.1 keep=aten.addmm.default#2,aten.gelu.default#1")),
    ("gpt", ("layers.0", "layers.1.mlp", "layers.1.attention keep=matmul")),
    ("resnet", ("stages.* keep=aten.convolution.default#1",)),
    ("vit", ("encoder.blocks.0 keep=aten.addmm.default#4", "encoder.blocks.1 keep=attention,matmul")),
    ("unet", ("down.* keep=aten.convolution.default#2", "up.*")),
    ("shared", ("mixer keep=aten.addmm.default#1",)),
)


def plan_of(flags: tuple[str, ...]) -> Plan:
    return Plan(tuple(Checkpoint.from_flag(flag) for flag in flags))


@pytest.mark.parametrize(("job", "flags"), CASES)
def test_predicted_peak_is_the_measured_one_to_the_byte(job, flags):
    """Also where several checkpoints of a plan stand side by side."""
    plan = plan_of(flags)
    assert peaks(plan.transform(recorded(job))) == peaks(record_step(job, plan))


@pytest.mark.parametrize(("job", "flags"), CASES[:3])
def test_training_stays_the_same_to_the_bit(job, flags):
    """Dropout inside the regions draws the same numbers again."""
    plain, under = train(job), train(job, plan_of(flags))
    assert under.losses == plain.losses
    assert all(torch.equal(under.state[name], value) for name, value in plain.state.items())


def test_under_autocast_calls_are_those_of_the_first_run():
    """The recompute casts weights again; the numbers of other operators' calls do not move."""
    precision, checkpoint = Precision.from_flag("bf16"), Checkpoint.from_flag("layers.* keep=aten.addmm.default#2+4")
    under = record_step("gpt", Plan((precision,)))
    assert peaks(checkpoint.transform(under)) == peaks(record_step("gpt", Plan((precision, checkpoint))))


def test_a_kept_call_frees_less_and_takes_less_time_than_none():
    step = recorded("gpt")
    nothing = Checkpoint.from_flag("layers.*").transform(step)
    one = Checkpoint.from_flag("layers.* keep=aten.addmm.default#3").transform(step)
    every = Checkpoint.from_flag("layers.* keep=aten.addmm.default").transform(step)
    assert peaks(nothing)[0] <= peaks(one)[0] < peaks(every)[0]
    assert sum(one.ops.is_recompute) == sum(nothing.ops.is_recompute) - 4  # one in each layer


def test_entries_are_read_and_described():
    kept = kept_operators(("attention", "aten.mm.default#2", "aten.mm.default#1+4", "aten.gelu.default"))
    assert kept.calls == {"aten.mm.default": {1, 2, 4}}
    assert [kept.has("aten.mm.default", call) for call in (3, 4)] == [False, True]
    assert kept.has("aten.gelu.default", 17)
    assert "aten._scaled_dot_product_flash_attention.default" in kept.names
    # All calls win over some of them.
    assert not kept_operators(("matmul", "aten.mm.default#2")).calls
    policy = Checkpoint.from_flag("layers.* keep=matmul,aten.gelu.default#1+2")
    assert policy.describe() == "checkpoint layers.* (keep matmul, gelu#1+2)"


@pytest.mark.parametrize("kind", ["matmul#1", "aten.mm.default#", "aten.mm.default#0", "aten.mm.default#1+", "#1"])
def test_wrong_numbers_are_refused(kind):
    with pytest.raises(PolicyError, match=r"aten\.mm\.default#1\+3|such as aten\.mm\.default"):
        Checkpoint(("layers.*",), keep=(kind,))


def test_calls_in_a_row_are_written_as_a_range() -> None:
    """What is spelled is read again as the same calls, and a number that is none is refused."""
    for numbers, text in (((1,), "1"), ((1, 2), "1+2"), ((1, 2, 3), "1-3"), ((1, 3, 4, 5, 9), "1+3-5+9")):
        assert spell_calls(numbers) == text
        assert kept_operators([f"aten.mm.default#{text}"]).calls == {"aten.mm.default": frozenset(numbers)}
    for text in ("0", "1-", "-2", "1+", "1-2-3", "9999999"):
        with pytest.raises(PolicyError, match="numbers of an operator's calls"):
            Checkpoint(("layers.*",), keep=(f"aten.mm.default#{text}",))


class Scaled(nn.Module):
    """A block that makes a tensor from a number, which torch returns from ``lift_fresh`` without writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.tanh(self.inner(x)) + torch.tensor(0.5))


def make_scaled():
    torch.manual_seed(0)
    return supervised(nn.Sequential(nn.Linear(64, 64), Scaled(), nn.Linear(64, 64)), (256, 64))


def test_tensors_made_from_numbers_may_be_kept_and_are_not_proposed(tmp_path):
    """The tensor is made before its operator and read after it, in the recompute, too."""
    step = record(make_scaled, tmp_path)
    policy = Checkpoint.from_flag("1 keep=aten.lift_fresh.default")
    assert "aten.lift_fresh.default" in step.ops.name
    assert peak(policy.transform(step)) == peak(record(make_scaled, tmp_path, policy))
    module = int(step.modules.module_id[step.modules.name == "1"][0])
    call = int(step.module_calls.module_id.tolist().index(module))
    ops = range(int(step.module_calls.first_op_id[call]), int(step.module_calls.last_op_id[call]) + 1)
    assert kept_sets(step, ops)
    assert not any("lift_fresh" in entry for kept in kept_sets(step, ops) for entry in kept)
