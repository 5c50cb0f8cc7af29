"""Numbers the current Python stack cheaply, and recognizes the job's custom autograd functions on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from memprof.recorder.calls.tracebacks import OWN_CODE
from memprof.recorder.log import RawLog
from memprof.recorder.steps.usages import COPYING, copies_state_dict, storing_phase
from memprof.trace.files.spool import SAVING

#: torch's activation checkpointing.
CHECKPOINT_FILE = ("utils/checkpoint.py", "utils\\checkpoint.py")
#: Code that is not the job's: torch's, and memprof's with its policies.
NOT_OF_JOB = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent.parent))
#: What calls the engine, and torch's backward of a compiled region, whose code is generated.
_ENGINE, _COMPILED = "_engine_run_backward", "_aot_autograd"
_DISPATCH = "__torch_dispatch__"
#: Where torch calls them, up to 2.13. Since 2.14 that is C++, without a frame.
_FILE = ("autograd/function.py", "autograd\\function.py")
#: What a backward calls to run operators again that autograd records.
_RECORDS_AGAIN = frozenset(("enable_grad", "set_grad_enabled"))


class StackTable:
    """Interns Python stacks as chains: the frames inside the innermost module call, then the stack of that call.

    An operator's own part is then three or four frames, however deep the model is.

    Attributes:
        storing: For each stack, the phase code if it saves or loads, else -1; the outermost such call counts.
    """

    def __init__(self, log: RawLog, boundary: CodeType | None, other: CodeType | None = None) -> None:
        """Creates an empty table.

        Args:
            log: Where new stacks are written, as [parent number, frames innermost first].
            boundary: Code of the function around every module call, where an inner part ends; None for whole stacks.
            other: A second such code.
        """
        self._log = log
        self._boundary, self._other = boundary, other or boundary
        self._codes: dict[int, CodeType] = {}  # keeps the code objects alive, so that an id always names the same one
        self._numbers: dict[tuple[int, ...], int] = {}
        self._inside: dict[tuple[tuple[str, ...], int], int] = {}
        self._has_checkpoint: list[bool] = []
        self._in_function: list[bool] = []
        self._of_job: dict[int, bool] = {}
        self._functions = FunctionCode()
        self.storing: list[int] = []

    def number(self, frame: FrameType | None, parent: int) -> int:
        """Returns the number of the stack that starts at `frame` and continues as `parent` beyond the boundary."""
        key = []
        boundary, other = self._boundary, self._other
        here = frame
        while here is not None:
            code = here.f_code
            if (code is boundary or code is other) and here is not frame:
                key.append(parent)
                break
            key.append(id(code))
            key.append(here.f_lasti)
            here = here.f_back
        found = self._numbers.get(tuple(key))
        if found is None:
            found = self._add(tuple(key), frame, parent if len(key) % 2 else -1)
        return found

    def in_backward(self, frame: FrameType | None, parent: int) -> int:
        """Returns the number of a stack in backward; -1 if no function of the job's runs between it and the engine.

        Such are a custom function's backward, hooks, and what unpacks saved tensors.
        """
        if frame is None or frame.f_code.co_name == _ENGINE:
            return -1
        number = self.number(frame, parent)
        if number not in self._of_job:
            self._of_job[number] = runs_code_of_job(frame)
        return number if self._of_job[number] else -1

    def inside(self, frames: tuple[str, ...], parent: int) -> int:
        """Returns the number of a stack of compiled code.

        Args:
            frames: Its frames as ``file:line:function``, innermost first.
            parent: The stack that called the code, -1 if unknown.
        """
        found = self._inside.get((frames, parent))
        if found is None:
            found = self._inside[frames, parent] = self._log.intern("stacks", (frames, parent), [parent, list(frames)])
            self._has_checkpoint.append(parent >= 0 and self._has_checkpoint[parent])
            self._in_function.append(parent >= 0 and self._in_function[parent])
            self.storing.append(self.storing[parent] if parent >= 0 else -1)
        return found

    def has_checkpoint(self, number: int) -> bool:
        """Whether a stack runs through torch.utils.checkpoint, or a function of the job's that does the same."""
        return number >= 0 and self._has_checkpoint[number]

    def is_in_function(self, number: int) -> bool:
        """Whether a stack runs through a custom autograd function of the job's, or through torch.utils.checkpoint."""
        return self._in_function[number] or self._has_checkpoint[number]

    def _add(self, key: tuple[int, ...], frame: FrameType | None, parent: int) -> int:
        frames = []
        through_checkpoint = parent >= 0 and self._has_checkpoint[parent]
        in_function = parent >= 0 and self._in_function[parent]
        storing = -1
        is_copying = False
        here = frame
        for _ in range(len(key) // 2):
            assert here is not None
            code = here.f_code
            self._codes[id(code)] = code
            if not code.co_filename.startswith(OWN_CODE):  # a higher-order operator's functions are called from memprof
                frames.append(f"{code.co_filename}:{here.f_lineno or code.co_firstlineno}:{code.co_name}")
            through_checkpoint = through_checkpoint or code.co_filename.endswith(CHECKPOINT_FILE)
            through_checkpoint = through_checkpoint or self._functions.runs_again(code)
            in_function = in_function or self._functions.is_in(code)
            is_copying = is_copying or code.co_name == COPYING
            named = storing_phase(code)
            storing = named if named >= 0 else storing
            here = here.f_back
        number = self._log.intern("stacks", key, [parent, frames])
        self._numbers[key] = number
        self._has_checkpoint.append(through_checkpoint)
        self._in_function.append(in_function)
        if parent >= 0 and self.storing[parent] >= 0:
            storing = self.storing[parent]
        elif storing < 0 and is_copying and copies_state_dict(frame):
            storing = SAVING
        self.storing.append(storing)
        return number


def runs_code_of_job(frame: FrameType | None) -> bool:
    """Whether a frame was called by a function of the job's that autograd's engine runs in backward.

    A dispatch mode or tensor subclass of the job's is no such function: it runs operators of the engine's own nodes.
    """
    is_of_job = False
    while frame is not None and (code := frame.f_code).co_name != _ENGINE:
        if _COMPILED in code.co_filename:
            return False
        is_of_job = (is_of_job or not code.co_filename.startswith(NOT_OF_JOB)) and code.co_name != _DISPATCH
        frame = frame.f_back
    return is_of_job


class FunctionCode:
    """Recognizes code that torch calls as a custom function's forward, with gradients off, or as its backward."""

    def __init__(self) -> None:
        self._known: dict[CodeType, bool] = {}
        self._known_backwards: dict[CodeType, bool] = {}

    def is_in(self, code: CodeType) -> bool:
        """Whether code is torch's that calls a custom autograd function, or the forward of one that exists."""
        found = self._known.get(code)
        if found is None:
            found = code.co_filename.endswith(_FILE) or any(code is each.__code__ for each in _functions("forward"))
            self._known[code] = found
        return found

    def runs_again(self, code: CodeType) -> bool:
        """Whether code is a custom function's backward that runs operators again, as checkpoints do."""
        found = self._known_backwards.get(code)
        if found is None:
            found = any(code is each.__code__ and records_again(each) for each in _functions("backward"))
            self._known_backwards[code] = found
        return found


def records_again(function: FunctionType) -> bool:
    """Whether a function, or one of its module that it names, turns autograd on, which is off in a plain backward."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    helpers = [each for each in named if isinstance(each, FunctionType) and each.__module__ == function.__module__]
    return any(not _RECORDS_AGAIN.isdisjoint(each.__code__.co_names) for each in (function, *helpers))


def _functions(name: str) -> Iterator[FunctionType]:
    """Yields the method of a name of every custom function, and what its decorators wrap."""
    pending: list[Any] = [torch.autograd.Function]
    while pending:
        kind = pending.pop()
        pending += type.__subclasses__(kind)
        method = vars(kind).get(name)
        method = getattr(method, "__func__", method)
        while method is not None:
            if isinstance(method, FunctionType):
                yield method
            method = getattr(method, "__wrapped__", None)
