"""Which calls of models have a step recorded after the window."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from memprof.recorder.steps.larger import LargerSteps, Move, elements_of

_MODEL, _LOSS = 0, 1


@dataclass
class Batch:
    """A batch with a field that is not a tensor."""

    ids: torch.Tensor
    name: str


def run(steps: Sequence[int], larger: LargerSteps, *, window: int = 2) -> list[int]:
    """Trains with these sizes, of which the first ones are the window; returns the later steps that were recorded."""
    found = []
    for number, elements in enumerate(steps):
        is_recorded = number < window
        if not is_recorded and larger.needs_step:
            larger.begin_step()
            is_recorded = True
            found.append(number)
        if larger.see(_MODEL, elements, trains=True, is_recording=is_recorded) is Move.BEGIN:
            larger.begin(_MODEL, trains=True)
            is_recorded = True
            found.append(number)
        larger.end_step(number, is_recorded=is_recorded, is_over=number >= window)
    return found


@pytest.mark.parametrize(
    ("sizes", "recorded"),
    [
        ([8, 8, 8, 8, 8], []),
        ([8, 8, 4, 8, 2], []),
        ([8, 6, 9, 9, 10], [2, 4]),
        ([1, 1, 5, 3, 5, 6, 5], [2, 5]),
    ],
)
def test_a_step_is_recorded_where_it_is_larger_than_all_before(sizes: list[int], recorded: list[int]) -> None:
    """And nothing is missed then."""
    larger = LargerSteps()
    assert run(sizes, larger) == recorded
    assert larger.sentence() == ""


def test_sizes_that_rise_all_along_are_not_all_recorded() -> None:
    """Sixteen steps are, the later ones a tenth apart; the largest of the others is named."""
    larger = LargerSteps()
    recorded = run([100, 100, *range(101, 2000)], larger)
    assert len(recorded) == 16
    assert recorded[:8] == list(range(2, 10))
    assert all(after - before > 9 for before, after in itertools.pairwise(recorded[8:]))
    assert larger.sentence().startswith("not recorded: step 1900 had larger inputs (1,999 elements) than any recorded")
    assert larger.sentence().endswith("record it with --skip 1900 --steps 1")


def test_a_size_known_too_late_has_the_next_steps_recorded() -> None:
    """Where a step has begun to train, its beginning is lost: those that follow are recorded until one is as large."""
    larger = LargerSteps()
    found = []
    for number, calls in enumerate([2, 2, 2, 5, 2, 5, 2, 2]):
        is_recorded = number < 2 or larger.needs_step
        if number >= 2 and is_recorded:
            larger.begin_step()
            found.append(number)
        moves = [larger.see(_MODEL, 10, trains=True, is_recording=is_recorded) for _ in range(calls)]
        assert moves == [Move.NONE] * calls
        larger.end_step(number, is_recorded=is_recorded, is_over=number >= 2)
    assert found == [4, 5]
    assert larger.sentence() == ""


def test_a_loss_with_more_elements_is_known_too_late() -> None:
    """It is called after the model, in the middle of the step."""
    larger = LargerSteps()
    for number, elements in enumerate([8, 8, 20]):
        assert larger.see(_MODEL, 8, trains=True, is_recording=number < 2) is Move.NONE
        assert larger.see(_LOSS, elements, trains=True, is_recording=number < 2) is Move.NONE
        larger.end_step(number, is_recorded=number < 2, is_over=number >= 2)
    assert larger.needs_step
    assert "step 2 had larger inputs (28 elements) than any recorded step (16)" in larger.sentence()


def test_an_evaluation_is_recorded_for_its_largest_batches() -> None:
    """As long as they grow; the training behind it is not, unless it is larger, too."""
    larger = LargerSteps()
    run([8, 8], larger)
    assert larger.see(_MODEL, 8, trains=False, is_recording=False) is Move.BEGIN
    larger.begin(_MODEL, trains=False)
    moves = [larger.see(_MODEL, size, trains=False, is_recording=True) for size in (9, 12)]
    assert moves == [Move.NONE, Move.NONE]
    assert larger.see(_LOSS, 1, trains=False, is_recording=True) is Move.NONE
    assert larger.see(_MODEL, 12, trains=False, is_recording=True) is Move.END
    larger.end_evaluation()
    assert larger.see(_MODEL, 100, trains=True, is_recording=False) is Move.NONE
    larger.end_step(2, is_recorded=False, is_over=True)
    assert larger.needs_step
    assert larger.see(_MODEL, 12, trains=False, is_recording=False) is Move.NONE
    assert larger.see(_MODEL, 13, trains=False, is_recording=False) is Move.BEGIN


def test_a_loss_made_for_an_evaluation_is_recorded_with_it() -> None:
    """It gets its number in the recorded batch, and is called again for the batches that are not recorded."""
    larger, loss = LargerSteps(), torch.nn.CrossEntropyLoss()
    run([8, 8], larger)
    assert larger.kind(-1, loss) == -1
    larger.meet(loss, 4, trains=False)
    kind = larger.kind(_LOSS, loss)
    assert larger.see(kind, 4, trains=False, is_recording=False) is Move.NONE
    larger.end_step(2, is_recorded=False, is_over=True)
    assert larger.sentence() == ""


def test_a_frozen_model_called_first_belongs_to_the_step() -> None:
    """Recorded from there on, the step is recorded to its end once a model trains in it."""
    larger = LargerSteps()
    run([8, 8], larger)
    assert larger.see(_LOSS, 8, trains=False, is_recording=False) is Move.BEGIN
    larger.begin(_LOSS, trains=False)
    assert larger.see(_MODEL, 8, trains=True, is_recording=True) is Move.NONE
    assert larger.see(_LOSS, 8, trains=False, is_recording=True) is Move.NONE


def test_elements_are_those_of_all_tensors() -> None:
    """In lists, dictionaries, fields and keywords; values other than tensors have none."""
    tensor = torch.zeros(3, 4)
    assert elements_of((tensor, None, 3), {"mask": tensor[0]}) == 12 + 4
    assert elements_of(([tensor, {"a": tensor}], Batch(tensor, "x")), {}) == 36
    assert elements_of(("text", dataclasses.fields(Batch)), {}) == 0


def test_no_operator_is_asked_for_elements() -> None:
    """Not even of a type of tensors that has rules of its own."""

    class Ruled(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_args: object, **_kwargs: object) -> object:
            raise AssertionError

    ruled = torch.Tensor._make_wrapper_subclass(Ruled, (5,))
    with torch._C.DisableTorchFunction():
        assert elements_of((torch.zeros(2), ruled), {}) == 2


def test_models_made_anew_in_every_step_are_compared_as_one() -> None:
    """A wrapper or a model of another trial has the kind of the first like it; a model of another shape has its own."""
    larger = LargerSteps()
    first, second, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    assert larger.kind(-1, second) == -1  # none like it has been seen
    assert [larger.kind(4, first), larger.kind(7, second), larger.kind(9, other)] == [4, 4, 9]
    assert larger.kind(-1, torch.nn.Linear(2, 2)) == 4
    larger.see(4, 64, trains=False, is_recording=True, kind=4)
    larger.end_step(2, is_recorded=True, is_over=True)
    larger.see(7, 64, trains=False, is_recording=False, kind=4)
    larger.end_step(3, is_recorded=False, is_over=True)
    assert larger.sentence() == ""
    larger.see(9, 8, trains=False, is_recording=False, kind=9)
    larger.end_step(4, is_recorded=False, is_over=True)
    assert "step 4 called a model without gradients, as no recorded step did" in larger.sentence()
