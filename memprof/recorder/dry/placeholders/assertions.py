"""Recognizes assertions by their bytecode: one on values that were not computed passes."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType

#: Instructions between a condition and its jump, and behind a jump that is not taken.
_BETWEEN = {"TO_BOOL", "NOT_TAKEN", "CACHE", "EXTENDED_ARG"}


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
