"""Errors of a job under a plan: which policy raised one, and the end of a job whose plan does not fit it."""

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
#: Errors about the patterns of any policy: another pattern helps, not another policy.
_PATTERNS = os.path.join(_POLICIES, "plan", "patterns.py")
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def policy_at_fault(error: BaseException) -> str:
    """Returns the name of the policy whose own code raised an error; "" where none did.

    What the job's code, a module's forward or an optimizer raises inside a policy's wrapper is theirs. Memory that ran
    out is asked for by whoever comes last, so that blames no policy.

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
    """Lets a policy that finds out while the job trains that it does not fit end it as one that knew before.

    Accumulate learns that no DataLoader feeds the loop when the first update comes, in-backward that gradients are
    clipped when they are: their sentence goes through the job's code as an exception, and is heard without a traceback.
    Of other errors it is noted which policy raised them, if one did; they are shown as without memprof.
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
    """Returns the files of a traceback, outermost first; no frame is kept."""
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return names


def _is_passed_through(name: str) -> bool:
    """Whether a file's frames say nothing of who is at fault.

    Those are memprof's recorder, Python's own library, and torch but for its modules and optimizers.
    """
    if name.startswith(_PACKAGE + os.sep) or ("site-packages" not in name and name.startswith(_STDLIB)):
        return True
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is None:
        return False
    folder = os.path.dirname(torch) + os.sep
    inner = name.removeprefix(folder)
    return name.startswith(folder) and not inner.startswith((os.path.join("nn", ""), os.path.join("optim", "")))
