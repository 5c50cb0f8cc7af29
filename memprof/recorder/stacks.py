"""Names the Python stack of the moment by a number, cheaply: stacks share their outer part as a chain."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType

from memprof.recorder.log import RawLog

#: torch's activation checkpointing.
CHECKPOINT_FILE = ("utils/checkpoint.py", "utils\\checkpoint.py")

_OWN = str(Path(__file__).parent)


class StackTable:
    """Interns Python stacks as chains: the frames inside the innermost module call, then the stack of that call.

    An operator's own part is then three or four frames deep, however deep the model is.
    """

    def __init__(self, log: RawLog, boundary: CodeType | None) -> None:
        """Makes an empty table.

        Args:
            log: Where new stacks are written, as [parent number, frames innermost first].
            boundary: Code of the function around every module call, where an inner part ends; None for whole stacks.
        """
        self._log = log
        self._boundary = boundary
        self._codes: dict[int, CodeType] = {}  # keeps the codes alive, so that an id names one code for good
        self._numbers: dict[tuple[int, ...], int] = {}
        self._has_checkpoint: list[bool] = []

    def number(self, frame: FrameType | None, parent: int) -> int:
        """Returns the number of the stack that starts at `frame` and, from the boundary outwards, is `parent`."""
        key = []
        boundary = self._boundary
        here = frame
        while here is not None:
            code = here.f_code
            if code is boundary and here is not frame:
                key.append(parent)
                break
            key.append(id(code))
            key.append(here.f_lasti)
            here = here.f_back
        found = self._numbers.get(tuple(key))
        if found is None:
            found = self._add(tuple(key), frame, parent if len(key) % 2 else -1)
        return found

    def has_checkpoint(self, number: int) -> bool:
        """Tells whether a stack runs through torch.utils.checkpoint."""
        return number >= 0 and self._has_checkpoint[number]

    def _add(self, key: tuple[int, ...], frame: FrameType | None, parent: int) -> int:
        frames = []
        through_checkpoint = parent >= 0 and self._has_checkpoint[parent]
        here = frame
        for _ in range(len(key) // 2):
            assert here is not None
            code = here.f_code
            self._codes[id(code)] = code
            if not code.co_filename.startswith(_OWN):  # a higher-order operator's functions are called from ours
                frames.append(f"{code.co_filename}:{here.f_lineno or code.co_firstlineno}:{code.co_name}")
            through_checkpoint = through_checkpoint or code.co_filename.endswith(CHECKPOINT_FILE)
            here = here.f_back
        number = self._log.intern("stacks", key, [parent, frames])
        self._numbers[key] = number
        self._has_checkpoint.append(through_checkpoint)
        return number
