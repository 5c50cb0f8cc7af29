"""Functions that are compiled again from their source."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memprof.recorder.calls.modules import StoringObserver
from memprof.recorder.calls.tracebacks import recompiled


def doubled(value: int, change: Callable[[int], int] = lambda one: one + 1) -> int:
    """Returns twice what a default makes of a value; the default has code of its own."""
    return 2 * change(value)


def test_the_code_is_that_of_the_function() -> None:
    """Also where the module's code has another's in front of it: that of a default, or of annotations."""
    code = recompiled(doubled, lambda definition: None)
    assert code.co_name == "doubled"
    assert code.co_consts == doubled.__code__.co_consts
    assert (code.co_firstlineno, list(code.co_positions())) == (
        doubled.__code__.co_firstlineno,
        list(doubled.__code__.co_positions()),
    )


class Stored:
    """Notes each call that saves or loads."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def begin(self, phase: int) -> int:
        self.seen.append(phase)
        return phase

    def end(self, token: int, error: BaseException | None) -> None:
        self.seen.append(error)


def test_a_compiled_function_that_saves_is_not_observed() -> None:
    """While it is traced, what torch.compile meets is torch's own code; outside, the call is noted."""
    stored, model = Stored(), torch.nn.Linear(4, 4)
    observer = StoringObserver(stored.begin, stored.end)

    @torch.compile(backend="eager", fullgraph=True)
    def weight() -> torch.Tensor:
        kept: torch.Tensor = model.state_dict()["weight"]
        return kept * 2

    observer.install()
    try:
        assert torch.equal(weight(), model.weight * 2)
        assert stored.seen == []
        model.state_dict()
        assert len(stored.seen) == 2
    finally:
        observer.remove()
