"""Which optimizer updates end a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import memprof
from memprof.recorder.steps.rounds import PATIENCE, OptimizerRounds
from memprof.trace.schema import ModuleCalls, Steps
from memprof.trace.store import Trace
from tests.recorder.conftest import RecordJob


class Optimizer:
    """Stands for an optimizer that reports its updates; else only its identity matters."""

    def step(self) -> None:
        """Marked as torch marks it."""

    step.hooked = True


def ends(rounds: OptimizerRounds, optimizers: list[Optimizer]) -> list[bool]:
    """Updates optimizers in turn and tells which updates ended a step; a step that ended is begun anew."""
    ended = []
    for optimizer in optimizers:
        ended.append(rounds.update(optimizer))
        if ended[-1]:
            rounds.begin_step()
    return ended


def test_every_update_of_a_single_optimizer_ends_a_step() -> None:
    """Whether it was known before or is met when it updates."""
    rounds, optimizer = OptimizerRounds(), Optimizer()
    assert ends(rounds, [optimizer] * 3) == [True] * 3


def test_a_gan_steps_when_both_have_updated() -> None:
    """Discriminator, generator, discriminator, generator: every second update ends a step."""
    rounds, critic, generator = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(critic)
    rounds.add(generator)
    assert ends(rounds, [critic, generator] * 2) == [False, True, False, True]


def test_optimizers_made_one_by_one_as_they_update_end_a_step_together() -> None:
    """As Pyro makes one for each parameter, in the first step; from the second on the last of them ends it."""
    rounds, optimizers = OptimizerRounds(), [Optimizer() for _ in range(4)]
    rounds.note_call()
    assert ends(rounds, optimizers) == [True, False, False, False]
    for _ in range(3):
        rounds.note_call()
        assert ends(rounds, optimizers) == [False, False, False, True]


def test_a_wasserstein_gan_steps_once_a_generator_update() -> None:
    """Five critic updates, then the generator's: the sixth update ends the step."""
    rounds, critic, generator = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(critic)
    rounds.add(generator)
    assert ends(rounds, [*[critic] * 5, generator] * 2) == ([False] * 5 + [True]) * 2


def test_an_optimizer_that_never_steps_is_dropped_from_the_round() -> None:
    """After the other has updated 16 times; from then on each of its updates is a step."""
    rounds, idle, busy = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(idle)
    rounds.add(busy)
    assert PATIENCE == 16
    assert ends(rounds, [busy] * 18) == [False] * 15 + [True] * 3


def test_an_idle_optimizer_that_wakes_up_is_waited_for_again() -> None:
    """A discriminator that joins in after the warm-up of the generator."""
    rounds, late, busy = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(late)
    rounds.add(busy)
    ends(rounds, [busy] * 16)
    assert ends(rounds, [late, busy, busy, late]) == [False, True, False, True]


def wrapped() -> tuple[OptimizerRounds, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns the rounds of a job with an optimizer and one around it, which shares its parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    rounds, inner, outer = OptimizerRounds(), torch.optim.SGD(parameters), torch.optim.Adam(parameters)
    rounds.meet([outer, inner])
    return rounds, inner, outer


def test_a_wrapper_that_is_never_stepped_itself_is_not_waited_for() -> None:
    """As SAM's users call its two halves, the second of which steps the optimizer within."""
    rounds, inner, outer = wrapped()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assert rounds.update(inner)
    assert rounds.members == 1
    rounds.begin_step()
    rounds.add(other)
    rounds.note_call()
    assert not rounds.update(inner)
    assert rounds.update(other)
    rounds.begin_step()
    rounds.note_call()
    assert not rounds.update(outer)  # from now on it is one of the round
    assert not rounds.update(inner)
    assert rounds.update(other)


def test_an_update_within_another_ends_no_step() -> None:
    """The wrapper's step contains that of the optimizer within, and work after it."""
    rounds, inner, outer = wrapped()
    for _ in range(3):
        rounds.begin_update(outer)
        rounds.begin_update(inner)
        assert not rounds.update(inner)
        assert rounds.update(outer)
        rounds.begin_step()


def test_an_update_that_raised_does_not_hold_up_those_after_it() -> None:
    """Neither its own, nor another optimizer's for long."""
    rounds, inner, outer = wrapped()
    rounds.begin_update(outer)  # and no end is reported
    ended = []
    for _ in range(PATIENCE + 1):
        rounds.begin_update(inner)
        ended.append(rounds.update(inner))
    assert ended == [False] * (PATIENCE - 1) + [True] * 2
    rounds.begin_step()
    rounds.note_call()
    rounds.begin_update(outer)
    rounds.begin_update(outer)
    assert not rounds.update(outer)  # waits for the other
    assert rounds.update(inner)


def test_a_dead_optimizer_is_not_waited_for() -> None:
    """A search over learning rates makes one optimizer after the other."""
    rounds, first, second = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(first)
    rounds.add(second)
    assert rounds.has_optimizers
    del first
    gc.collect()
    assert ends(rounds, [second] * 2) == [True, True]
    assert rounds.alive() == [second]
    del second
    gc.collect()
    assert not rounds.has_optimizers


def test_updates_and_members_of_a_round_are_counted() -> None:
    """Three updates of two optimizers so far; a new round counts from none."""
    rounds, critic, generator = OptimizerRounds(), Optimizer(), Optimizer()
    rounds.add(critic)
    rounds.add(generator)
    rounds.update(critic)
    rounds.update(critic)
    rounds.update(generator)
    assert (rounds.updates, rounds.members) == (3, 2)
    rounds.begin_step()
    assert (rounds.updates, rounds.members) == (0, 2)


@pytest.mark.parametrize("critic_updates", [1, 3])
def test_a_recorded_gan_has_rounds_for_steps(record_job: RecordJob, critic_updates: int) -> None:
    """Recorded, a step holds the updates of one round, and the manifest says what a step is."""

    def job() -> list[torch.Tensor]:
        torch.manual_seed(3)
        generator, critic = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        for_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(5):
            for _ in range(critic_updates):
                for_critic.zero_grad()
                critic(generator(torch.randn(3, 2)).detach()).sum().backward()
                for_critic.step()
            for_generator.zero_grad()
            critic(generator(torch.randn(3, 2))).sum().backward()
            for_generator.step()
        return [generator.weight.detach(), critic.weight.detach()]

    trace = record_job(job, steps=2)
    steps = trace.table(Steps)
    assert steps.optimizer_updates[:3].tolist() == [critic_updates + 1] * 3
    assert trace.recorded_steps == (1, 2)
    assert "a step is one round of 2 optimizers: each has updated at least once" in trace.manifest.notes


class SharpnessAware(torch.optim.Optimizer):
    """Climbs along the gradient, and lets an optimizer with the same groups use the gradient found there."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        """Makes the optimizer within."""
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        """Adds the gradient to every parameter."""
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        """Goes back and updates."""
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["before"])
        self.base.step()

    def step(self, closure: Callable[[], None]) -> None:
        """Both, with the closure between them."""
        self.climb()
        closure()
        self.descend()


@pytest.mark.parametrize("is_light", [False, True], ids=["record", "light"])
@pytest.mark.parametrize("steps_itself", [False, True], ids=["halves", "step"])
def test_a_round_of_sharpness_aware_minimization_is_a_step(
    tmp_path: Path, *, steps_itself: bool, is_light: bool
) -> None:
    """Two passes through the model, whether the job calls the two halves or the whole."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = SharpnessAware(model.parameters())

    def run_model() -> None:
        model(torch.randn(3, 4)).sum().backward()

    with memprof.record(tmp_path / "run.memprof", **({"light": True} if is_light else {"skip": 1, "steps": 3})):
        for _ in range(5):
            optimizer.zero_grad()
            run_model()
            if steps_itself:
                optimizer.step(run_model)
            else:
                optimizer.climb()
                run_model()
                optimizer.descend()
    trace = Trace.open(tmp_path / "run.memprof")
    assert trace.table(Steps).optimizer_updates[:4].tolist() == [2 if steps_itself else 1] * 4
    if not is_light:
        assert trace.recorded_steps == (1, 2, 3)
        calls = trace.table(ModuleCalls)
        assert [np.sum((calls.step == step) & (calls.module_id == 0)) for step in (1, 2, 3)] == [2, 2, 2]


def test_wrappers_that_never_report_are_not_waited_for() -> None:
    """A wrapper around an optimizer (accelerate's, opacus') does not hold up the end of the step."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def step(self, closure: object = None) -> None:
            self.inner.step()

    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    wrapper = Wrapper(inner)
    rounds = OptimizerRounds()
    rounds.add(wrapper)
    rounds.add(inner)
    assert not rounds.meet([wrapper, inner])
    assert rounds.update(inner)


@pytest.mark.parametrize("is_light", [False, True], ids=["record", "light"])
def test_optimizers_discarded_before_a_recording_are_not_waited_for(tmp_path: Path, is_light: bool) -> None:
    """An optimizer of an earlier cell of a notebook, held by a reference cycle alone, is not waited for."""
    discarded = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    discarded.itself = discarded
    gc.disable()  # so that it is still there
    try:
        del discarded
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memprof.record(tmp_path / "run.memprof", **({"light": True} if is_light else {"skip": 0, "steps": 3})):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
    finally:
        gc.enable()
    trace = Trace.open(tmp_path / "run.memprof")
    assert trace.table(Steps).optimizer_updates[:3].tolist() == [1, 1, 1]
