"""Errors of a job under a plan: which policy raised one, and ending a job whose plan does not fit it."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

from memprof.errors import PolicyError
from memprof.launch.outcome.plan_marks import mark_fault, refuse

_PACKAGE = str(Path(__file__).absolute().parents[2])
_POLICIES = os.path.join(_PACKAGE, "policies") + os.sep
#: Errors about module patterns are common to all policies: another pattern helps, not another policy.
_PATTERNS = os.path.join(_POLICIES, "plan", "patterns.py")
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def policy_at_fault(error: BaseException) -> str:
    """Returns the name of the policy whose own code raised an error; "" if none did.

    Errors that the job's code, a module's forward or an optimizer raises inside a policy's wrapper are their own. An
    out-of-memory error hits whichever allocation comes last, so it is attributed to no policy.

    Args:
        error: The error, with its traceback.
    """
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error):
        return ""
    for name in reversed(_files_of(error.__traceback__)):
        if name == _PATTERNS:
            return ""
        if name.startswith(_POLICIES):
            folder, separator, _ = name.removeprefix(_POLICIES).partition(os.sep)
            if separator and os.path.isfile(os.path.join(_POLICIES, folder, "policy.py")):
                return folder
        elif not _is_passed_through(name):
            return ""
    return ""


def end_at_policy_errors(spool: Path) -> None:
    """Ends the job cleanly when a policy finds during training that it does not fit, as one that fails up front.

    For example, accumulate finds at the first update that no DataLoader feeds the loop, and in-backward finds that
    gradients are clipped when they are. Their error passes through the job's code as an exception, and is reported
    without a traceback. For other errors, the policy that raised them is recorded, if any; they are shown unchanged.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, PolicyError):
            refuse(str(error), spool, policy_at_fault(error))
        if policy := policy_at_fault(error):
            mark_fault(spool, policy)
        before(kind, error, trace)

    sys.excepthook = hook


def _files_of(trace: types.TracebackType | None) -> list[str]:
    """Returns the files of a traceback, outermost first; keeps no frame."""
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return names


def _is_passed_through(name: str) -> bool:
    """Whether a file's frames are irrelevant to which code is at fault.

    True for memprof's recorder, Python's own library, and torch except its modules and optimizers.
    """
    if name.startswith(_PACKAGE + os.sep) or ("site-packages" not in name and name.startswith(_STDLIB)):
        return True
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is None:
        return False
    folder = os.path.dirname(torch) + os.sep
    inner = name.removeprefix(folder)
    return name.startswith(folder) and not inner.startswith((os.path.join("nn", ""), os.path.join("optim", "")))
