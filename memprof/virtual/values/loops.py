"""Ends loops whose end depends on values, and recognizes assertions on them by their bytecode."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

#: Instructions after which the next one is not executed.
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
#: Instructions between a condition and its jump, and behind a jump that is not taken.
_BETWEEN = {"TO_BOOL", "NOT_TAKEN", "CACHE", "EXTENDED_ARG"}


def is_end_of_loop(frame: FrameType | None) -> bool:
    """Returns whether a ``while`` loop ends if a condition is true, directly or by ``break``, ``return`` or ``raise``.

    Loops over something (``for``) end in any case.

    Args:
        frame: The job's frame that reads a truth value.
    """
    return frame is not None and _ends(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _ends(code: CodeType, offset: int) -> bool:
    found = find_jump(code, offset)
    if found is None:
        return False
    instructions, place = found
    jump = instructions[place]
    places = {each.offset: number for number, each in enumerate(instructions)}
    taken = places[jump.argval] if jump.opname.endswith("IF_TRUE") else place + 1
    jumps = [(number, each) for number, each in enumerate(instructions) if "JUMP" in each.opname]
    loops = [(places[each.argval], number) for number, each in jumps if each.argval <= each.offset]
    return any(
        first <= place <= last
        and instructions[first].opname != "FOR_ITER"
        and _leaves(instructions, places, taken, first, last)
        for first, last in loops
    )


def _leaves(instructions: list[dis.Instruction], places: dict[int, int], place: int, first: int, last: int) -> bool:
    """Whether the instructions from a place on leave a loop before any other condition."""
    seen = set()
    while first <= place <= last:
        one = instructions[place]
        if one.opname in _ENDS:
            return True
        if place in seen or one.opname.startswith(("POP_JUMP", "FOR_ITER")):
            return False
        seen.add(place)
        place = places[one.argval] if one.opname.startswith("JUMP") and "IF" not in one.opname else place + 1
    return True


#: A loop is endless that reads a placeholder in so many rounds of one step, times the operators run meanwhile.
_MOST = 10_000_000


class Rounds:
    """Counts the rounds of loops that may end by a placeholder, within a step.

    Attributes:
        operators: Operators that were dry-run so far.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.operators = 0
        self._seen: dict[tuple[CodeType, int, CodeType, int], tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Begins a step."""
        self._seen.clear()

    def note(self, frame: FrameType | None) -> str:
        """Notes that a placeholder was read.

        Args:
            frame: The job's frame that reads it, in a loop or called by one.

        Returns:
            Why the dry run cannot go on; "" if it can.
        """
        outer = frame
        while outer is not None and _may_leave(outer.f_code, outer.f_lasti) is None:
            outer = outer.f_back
        if frame is None or outer is None or not _may_leave(outer.f_code, outer.f_lasti):
            return ""
        key = outer.f_code, outer.f_lasti, frame.f_code, frame.f_lasti
        rounds, first = self._seen.get(key, (0, self.operators))
        self._seen[key] = rounds + 1, first
        if rounds * (self.operators - first) < _MOST:
            return ""
        line = f"{Path(outer.f_code.co_filename).name}:{outer.f_lineno}"
        return (
            f"the loop at {line} cannot be dry-run: it has not ended after {rounds:,} rounds of a step, and its end "
            "depends on values that were not computed. Record a real run, memprof record -o run.memprof, and replay "
            "its values: memprof record --dry-run --values-from run.memprof."
        )


@lru_cache(maxsize=4096)
def _may_leave(code: CodeType, offset: int) -> bool | None:
    """Whether the innermost loop around an instruction ends by a condition; None if the instruction is in no loop."""
    instructions = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    place = places.get(offset, -1)
    jumps = [(number, places[each.argval]) for number, each in enumerate(instructions) if "JUMP" in each.opname]
    around = [(target, number) for number, target in jumps if target <= place <= number]
    if not around:
        return None
    first, last = max(around, key=lambda one: (one[0], -one[1]))
    last = max(number for number, target in jumps if target == first)
    if instructions[first].opname != "FOR_ITER":
        return True
    leaves = any(first <= number <= last and not first <= target <= last for number, target in jumps)
    return leaves or any(each.opname in _ENDS for each in instructions[first : last + 1])


#: Evaluations of the loss after which the history is full: the first two add nothing to it.
_FIRST = 3


def end_updates(
    falling: Callable[[Callable[[], Any], int], AbstractContextManager[Callable[[], Any]]],
    count_search: Callable[[], Any],
) -> None:
    """Ends each update once the history is full, or after its largest number of iterations, and searches at once.

    Args:
        falling: Lets the loss that an update reads fall, for as many evaluations of it as given.
        count_search: Called for each line search, which stops at its first trial.
    """
    kind: Any = torch.optim.LBFGS
    module: Any = sys.modules[kind.__module__]  # torch.optim has no attribute of this name
    search, update = module._strong_wolfe, kind.step

    @wraps(search)
    def search_once(*given: Any, **settings: Any) -> Any:
        count_search()
        return search(*given, **{**settings, "max_ls": 0})

    @wraps(update)
    def update_until_full(optimizer: Any, closure: Any) -> Any:
        with falling(closure, optimizer.param_groups[0]["history_size"] + _FIRST) as evaluate:
            return update(optimizer, evaluate)

    module._strong_wolfe, kind.step = search_once, update_until_full


def passing_condition(frame: FrameType | None) -> bool | None:
    """Returns the truth value with which an assertion passes.

    Args:
        frame: The job's frame that reads a truth value.

    Returns:
        None if the frame reads it for another purpose than for an assertion.
    """
    return None if frame is None else _passing(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _passing(code: CodeType, offset: int) -> bool | None:
    found = find_jump(code, offset)
    if found is None:
        return None
    instructions, place = found
    jump = instructions[place]
    jumps_if = jump.opname.endswith("IF_TRUE")
    if _fails(instructions, place + 1):
        return jumps_if
    target = next(number for number, each in enumerate(instructions) if each.offset == jump.argval)
    return not jumps_if if _fails(instructions, target) else None


def find_jump(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int] | None:
    """Finds the jump on a truth value.

    Args:
        code: The code that reads the truth value.
        offset: The instruction that does.

    Returns:
        The instructions, and the place of the jump among them; None if the value is read for another purpose.
    """
    instructions = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    place = places.get(offset, len(instructions))
    while place < len(instructions) and instructions[place].opname in _BETWEEN:
        place += 1
    if place == len(instructions):
        return None
    name = instructions[place].opname
    is_jump = name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
    return (instructions, place) if is_jump else None


def _fails(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether the instructions from a place on raise an AssertionError, as those of an assertion do."""
    while place < len(instructions) and instructions[place].opname in _BETWEEN:
        place += 1
    if place == len(instructions):
        return False
    one = instructions[place]
    return one.opname == "LOAD_ASSERTION_ERROR" or (
        one.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in one.argrepr
    )
