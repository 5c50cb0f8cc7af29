"""Keeps the recorder out of the job's tracebacks.

An operator that fails below the dispatch mode propagates through the mode's frame. Those frames are removed from the
traceback where it can still be changed: on exit from each module call, and before Python prints it at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload

_own = [str(Path(__file__).parent.parent)]


def hide_frames_of(folder: Path) -> None:
    """Treats the code of another folder as the recorder's: that of a policy that runs the job's operators."""
    if str(folder) not in _own:
        _own.append(str(folder))


def remove_own_frames(error: BaseException) -> None:
    """Removes the recorder's frames from the tracebacks of an error and of its causes."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        here = pending.pop()
        if here is None or id(here) in seen:
            continue
        seen.add(id(here))
        here.__traceback__ = _without_own(here.__traceback__)
        pending += [here.__cause__, here.__context__]


def clean_uncaught() -> None:
    """Makes Python print the current error, if uncaught, without the recorder's frames."""
    present = sys.excepthook
    if getattr(present, "is_memprof", False):
        return

    def print_clean(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        remove_own_frames(error)
        return present(kind, error, _without_own(trace))

    print_clean.is_memprof = True  # type: ignore[attr-defined]
    sys.excepthook = print_clean


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    frames = _frames(trace)
    for before, here in reversed(list(zip([None, *frames], frames, strict=False))):
        if not _is_own(here) and not _leads_to_own(here) and not _is_call_of_own(before, here):
            if here.tb_next is not kept:
                here.tb_next = kept
            kept = here
    return kept


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _leads_to_own(trace: TracebackType) -> bool:
    """Whether a frame is torch's dispatch of a higher-order operator to memprof's mode, which dispatches it again."""
    is_dispatch = trace.tb_frame.f_code is HigherOrderOperator.dispatch.__code__
    return is_dispatch and trace.tb_next is not None and _is_own(trace.tb_next)


def _is_call_of_own(before: TracebackType | None, trace: TracebackType) -> bool:
    """Whether a frame is an operator call made by memprof's mode, which torch's own dispatch would not make."""
    return before is not None and _is_own(before) and trace.tb_frame.f_code is OpOverload.__call__.__code__


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(tuple(_own))
