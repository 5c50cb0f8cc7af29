"""Activation checkpointing where autograd keeps more than what operators read, or runs in unusual ways."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.trace.schema import NONE
from tests.policies.faces import peaks, record_step, recorded, train


@pytest.mark.parametrize(
    "flag",
    [
        "recurrent.cell",  # gates in place: their nodes keep clones
        "experts",  # index_add_ keeps what it adds, and reads its size only
        "convs",  # in place on a view
        "gate",
        "experts,convs.* keep=matmul",
    ],
)
def test_predicted_peak_is_the_measured_one_to_the_byte(flag):
    """Whatever a node of autograd's graph keeps is known: clones of what is overwritten, and what is never read."""
    policy = Checkpoint.from_flag(flag)
    assert peaks(policy.transform(recorded("inplace"))) == peaks(record_step("inplace", Plan((policy,))))


def test_training_stays_the_same_to_the_bit():
    """Also where forwards change their own tensors in place."""
    plan = Plan((Checkpoint.from_flag("recurrent,experts,convs,gate,turn"),))
    plain, under = train("inplace"), train("inplace", plan)
    assert under.losses == plain.losses
    assert all((under.gradients[name] == value).all() for name, value in plain.gradients.items())


def test_calls_without_gradients_are_no_regions():
    """A frozen teacher runs under no_grad: it is skipped, and is not a region."""
    with pytest.raises(PolicyError, match="backward runs through no call of teacher"):
        Checkpoint(modules=("teacher",)).transform(recorded("inplace"))


def test_functions_that_keep_what_they_made_are_refused():
    """An attribute of ctx stays where a saved tensor would be dropped; the trace shows no difference."""
    for modules in (("turn",), ("",)):
        with pytest.raises(PolicyError, match=r"autograd\.Function or .* keep tensors made on the way"):
            Checkpoint(modules=modules).transform(recorded("inplace"))


def test_regions_that_backward_runs_through_twice_are_refused():
    """With retain_graph a region is recomputed for each backward: this is refused; other cases are predicted."""
    step = recorded("inplace")
    # The backward of `out` comes again at the end of backward, as another one through the same graph would.
    module = step.modules.name.tolist().index("out")
    ops = step.ops
    rows = np.flatnonzero((ops.module_id == module) & (ops.forward_op_id != NONE))
    first = rows[ops.forward_op_id[rows] == ops.forward_op_id[rows[0]]]
    backward = np.flatnonzero(ops.phase == "backward")
    names, owners = ops.name.copy(), ops.forward_op_id.copy()
    last = backward[-len(first) :]
    names[last], owners[last] = names[first], owners[first]
    again = dataclasses.replace(step, ops=ops.replace(name=names, forward_op_id=owners))
    with pytest.raises(PolicyError, match="backward runs through out more than once"):
        Checkpoint(modules=("out",)).transform(again)
    Checkpoint(modules=("experts",)).transform(again).check()


def test_what_runs_again_already_is_refused():
    """A job with activation checkpointing of its own is predicted for the modules apart from that."""
    own = Checkpoint(modules=("experts",)).transform(recorded("inplace"))
    for modules in (("experts",), ("experts.router",), ("",)):
        with pytest.raises(PolicyError, match="already runs again in backward"):
            Checkpoint(modules=modules).transform(own)
    Checkpoint(modules=("recurrent",)).transform(own).check()


def test_a_buffer_that_forward_assigns_anew_is_refused():
    """A recompute would assign it again: two updates of an average in a step. A cache is assigned in one call."""

    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return (x - self.mean).tanh()

    job = Job(torch.nn.Sequential(torch.nn.Linear(4, 4), Average()))
    Checkpoint(modules=("1",)).apply(job)
    job.model(torch.ones(2, 4))
    with pytest.raises(PolicyError, match="1 changes"):
        job.model(torch.ones(2, 4))
    job.undo()
