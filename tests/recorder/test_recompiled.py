"""Functions that are compiled again from their source."""

from __future__ import annotations

from collections.abc import Callable

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
