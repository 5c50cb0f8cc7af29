"""The line of the user's own code behind each Python stack."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Ints, Stacks

# Matched on text alone: a trace is often read on another machine than the one that wrote it.
_PACKAGES = r"[/\\](?:site|dist)-packages[/\\]"
_LIBRARY_FRAME = re.compile(
    rf"{_PACKAGES}(?:torch|functorch|memprof)[/\\]"
    r"|[/\\]memprof[/\\](?:recorder|launch)[/\\]"  # an editable install of memprof
    r"|[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\](?!(?:site|dist)-packages[/\\])"
    r"|[/\\]python3?\d*[/\\]lib[/\\](?!site-packages[/\\])\w+(?:[/\\]\w+)*\.py$"  # Windows
    r"|^<frozen |^<eval_with_key>|^<__array_function__",
    re.IGNORECASE,
)
_INSTALLED = re.compile(rf"^.*{_PACKAGES}", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class SourceLine:
    """One line of code.

    Attributes:
        file: Path as recorded.
        line: Line number, 1 first.
        function: Function the line is in.
        place: ``file:line`` for people: the path below the folder that all the job's own files share, or below
            ``site-packages``.
    """

    file: str
    line: int
    function: str
    place: str


@dataclass(frozen=True, eq=False)
class Sources:
    """The source line of every stack of a trace.

    Attributes:
        lines: The distinct lines.
        line_of_stack: Position in ``lines`` for each stack, ``NONE`` for a stack without frames, shape ``(stacks,)``.
        frames: Each stack's frames, innermost first, as in the trace.
    """

    lines: tuple[SourceLine, ...]
    line_of_stack: Ints
    frames: tuple[str, ...]

    def of_stack(self, stack_id: int) -> SourceLine | None:
        """Returns the source line of a stack, or None where there is no stack."""
        if stack_id == NONE or self.line_of_stack[stack_id] == NONE:
            return None
        return self.lines[int(self.line_of_stack[stack_id])]

    def user_frames(self, stack_id: int) -> tuple[SourceLine, ...]:
        """Returns the frames of a stack outside torch and the standard library (all if none is), innermost first."""
        frames = [_parse(frame) for frame in self.frames[stack_id].splitlines() if frame]
        kept = [frame for frame in frames if not is_library(frame[0])] or frames
        folder = _shared_folder([line.file for line in self.lines])
        return tuple(SourceLine(*frame, place=_place(frame[0], frame[1], folder)) for frame in kept)


def find_sources(stacks: Stacks) -> Sources:
    """Finds the line of the user's code in each stack.

    It is the innermost frame outside torch, Python's standard library and memprof; in a stack that has none (code
    that torch generated, say) the innermost frame of all.

    Args:
        stacks: The trace's stacks.
    """
    found: dict[tuple[str, int, str], int] = {}
    line_of_stack = np.full(len(stacks), NONE, dtype=np.int64)
    for row, frames in enumerate(stacks.frames):
        frame = _user_frame(frames)
        if frame is not None:
            line_of_stack[row] = found.setdefault(frame, len(found))
    folder = _shared_folder([file for file, _, _ in found])
    lines = tuple(SourceLine(file, line, name, _place(file, line, folder)) for file, line, name in found)
    return Sources(lines, line_of_stack, tuple(stacks.frames))


def is_library(file: str) -> bool:
    """Tells whether a file belongs to torch, Python's standard library or memprof."""
    return _LIBRARY_FRAME.search(file) is not None


def _user_frame(frames: str) -> tuple[str, int, str] | None:
    innermost = None
    for text in frames.splitlines():
        frame = _parse(text)
        if not is_library(frame[0]):
            return frame
        innermost = innermost or frame
    return innermost


def _parse(frame: str) -> tuple[str, int, str]:
    """Splits ``file:line:function``; a file's name may hold colons itself."""
    file, line, function = ["", "", *frame.rsplit(":", 2)][-3:]
    return (file, int(line), function) if line.isdigit() else (frame, 0, "")


def _shared_folder(files: list[str]) -> str:
    """Returns the folder above all the job's own files, or "" where they share none but the root."""
    own = [os.path.dirname(file) for file in files if file.startswith("/") and not _is_elsewhere(file)]  # noqa: PTH120
    folder = os.path.commonpath(own) if own else ""
    return "" if folder == "/" else folder


def _is_elsewhere(file: str) -> bool:
    return is_library(file) or _INSTALLED.match(file) is not None


def _place(file: str, line: int, folder: str) -> str:
    if _INSTALLED.match(file):
        name = _INSTALLED.sub("", file)
    elif folder and file.startswith(f"{folder}/"):
        name = file[len(folder) + 1 :]
    else:
        name = re.sub(r"^.*[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\]", "", file)
    return f"{name}:{line}" if line else name
