"""Steps that are represented by another one."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.replay.live import distinct_steps, fullest_of, is_within
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step


def _step(size: int, name: str = "aten.mul.Tensor", workspace: int = 0) -> Step:
    return make_step(
        [Op(name, makes=("a",), workspace=workspace), Op(phase="backward", reads=("a",), frees=("a",))],
        [Storage("a", size)],
    )


def test_smaller_storages_in_the_same_operators_are_within() -> None:
    """A shorter batch of the same job; not the other way round."""
    assert is_within(_step(10), _step(20))
    assert is_within(_step(10), _step(10))
    assert not is_within(_step(20), _step(10))


def test_other_operators_or_more_workspace_are_not() -> None:
    """A step that does something else may be fuller under a plan, however small it is now."""
    assert not is_within(_step(10, "aten.add.Tensor"), _step(20))
    assert not is_within(_step(10, workspace=1), _step(20))


def test_a_longer_life_is_not() -> None:
    """What is freed later may meet a peak that the other step does not have."""
    step = _step(10)
    longer = dataclasses.replace(step, storages=step.storages.replace(freed_op_id=np.array([-1])))
    assert not is_within(longer, _step(20))


def test_storages_from_before_are_compared_in_any_order() -> None:
    """Their ids are those of the run, and a device's allocator does not always cut the tail off a block."""
    read = Op(phase="backward", reads=("a", "b"), frees=("a", "b"))
    one = make_step([read], [Storage("a", 20), Storage("b", 10), Storage("host", 0)])
    two = make_step([read], [Storage("b", 10), Storage("a", 20)])
    with_tail = two.storages.replace(allocated_bytes=two.storages.requested_bytes + 3)
    assert is_within(one, two)
    assert is_within(dataclasses.replace(two, storages=with_tail), one)
    assert not is_within(make_step([read], [Storage("b", 20), Storage("a", 20)]), one)


def test_only_steps_that_nothing_stands_for_are_kept() -> None:
    """The step with the highest peak first; identical steps once."""
    lead, short, evaluates = _step(40), _step(10), _step(30, "aten.relu.default")
    kept = distinct_steps(lead, [short, evaluates, _step(20, "aten.relu.default"), lead])
    assert kept == (evaluates,)
    assert fullest_of((short, lead, evaluates)) is lead
