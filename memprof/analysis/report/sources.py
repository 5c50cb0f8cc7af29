"""The line of the user's own code behind each Python stack."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from memprof.trace.schema import Stacks

# Matched on text alone: a trace is often read on another machine than the one that wrote it.
_PACKAGES = r"[/\\](?:site|dist)-packages[/\\]"
_LIBRARY_FRAME = re.compile(
    rf"{_PACKAGES}(?:torch|functorch|memprof)[/\\]"
    r"|[/\\]memprof[/\\](?:recorder|launch|policies)[/\\]"  # an editable install of memprof
    r"|[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\](?!(?:site|dist)-packages[/\\])"
    r"|[/\\]python3?\d*[/\\]lib[/\\](?!site-packages[/\\])\w+(?:[/\\]\w+)*\.py$"  # Windows
    r"|[/\\]torchinductor_[^/\\]*[/\\]"  # code that torch.compile wrote
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
    """The source lines of every stack of a trace.

    Attributes:
        user_frames: For each stack its frames outside torch, Python's standard library and memprof, innermost first;
            all frames of a stack that has none.
    """

    user_frames: tuple[tuple[SourceLine, ...], ...]

    def of_stack(self, stack_id: int) -> SourceLine | None:
        """Returns the innermost line of the user's code in a stack, or None where there is no stack."""
        frames = self.user_frames[stack_id] if 0 <= stack_id < len(self.user_frames) else ()
        return frames[0] if frames else None


def find_sources(stacks: Stacks) -> Sources:
    """Finds the lines of the user's code in each stack.

    Args:
        stacks: The trace's stacks.
    """
    split = [frames.splitlines() for frames in stacks.frames]
    distinct = {frame: _parse(frame) for frames in split for frame in frames}  # stacks share most of their frames
    library = {frame for frame, (file, _, _) in distinct.items() if is_library(file)}
    own = [file for frame, (file, _, _) in distinct.items() if frame not in library and not _INSTALLED.match(file)]
    folder = _shared_folder(own)
    lines = {
        frame: SourceLine(file, line, function, _place(file, line, folder))
        for frame, (file, line, function) in distinct.items()
    }
    kept = [[frame for frame in frames if frame not in library] or frames for frames in split]
    return Sources(tuple(tuple(lines[frame] for frame in frames) for frames in kept))


def is_library(file: str) -> bool:
    """Tells whether a file belongs to torch, Python's standard library or memprof."""
    return _LIBRARY_FRAME.search(file) is not None


def _parse(frame: str) -> tuple[str, int, str]:
    """Splits ``file:line:function``; a file's name may hold colons itself."""
    file, line, function = ["", "", *frame.rsplit(":", 2)][-3:]
    return (file, int(line), function) if line.isdigit() else (frame, 0, "")


def _shared_folder(files: list[str]) -> str:
    """Returns the folder above all files, or "" where they share none but the root."""
    folders = {str(PurePosixPath(file).parent) for file in files if file.startswith("/")}
    folder = os.path.commonpath(folders) if folders else ""
    return "" if folder == "/" else folder


def _place(file: str, line: int, folder: str) -> str:
    if _INSTALLED.match(file):
        name = _INSTALLED.sub("", file)
    elif folder and file.startswith(f"{folder}/"):
        name = file[len(folder) + 1 :]
    else:
        name = re.sub(r"^.*[/\\]lib(?:64)?[/\\]python3\.\d+t?[/\\]", "", file)
    return f"{name}:{line}" if line else name
