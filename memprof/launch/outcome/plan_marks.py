"""The status of a plan in the job's processes, read by the parent, and the errors of a job under a plan."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

from memprof.errors import PolicyError
from memprof.trace.files.private_file import FILE_MODE, open_private

#: Exit status of a job that ends because its plan does not fit.
REFUSED_STATUS = 125
_REFUSED = "plan-refused"
_FAULT = "plan-fault"
_APPLIED = "plan-applied-"
_IDLE = "plan-idle-"
_PACKAGE = str(Path(__file__).absolute().parents[2])
_POLICIES = os.path.join(_PACKAGE, "policies") + os.sep
#: Errors about module patterns are common to all policies: another pattern helps, not another policy.
_PATTERNS = os.path.join(_POLICIES, "plan", "patterns.py")
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def refuse(sentence: str, spool: Path, policy: str = "") -> NoReturn:
    """Ends the job with status 125; the parent prints why.

    Args:
        sentence: The reason.
        spool: The recording's spool folder.
        policy: Name of the policy at fault, "" if unknown.

    Raises:
        SystemExit: Always, in the main thread; in another thread it would end only that thread.
    """
    mark_refused(spool, sentence)
    if policy:
        mark_fault(spool, policy)
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(REFUSED_STATUS)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(REFUSED_STATUS)


def mark_refused(spool: Path, sentence: str) -> None:
    """Records why a process ended itself; only the first is kept."""
    _mark_first(spool, _REFUSED, sentence)


def mark_fault(spool: Path, policy: str) -> None:
    """Records which policy raised the error that ends a process; only the first is kept."""
    _mark_first(spool, _FAULT, policy)


def _mark_first(spool: Path, name: str, text: str) -> None:
    try:
        descriptor = os.open(os.path.join(spool, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE)
    except OSError:
        # Another process was first, or the file cannot be written: the exit status suffices.
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def mark_applied(spool: Path, numbers: list[int]) -> None:
    """Records which policies of the plan this process has applied."""
    _write_list(spool, _APPLIED, numbers)


def mark_idle(spool: Path, sentences: list[str]) -> None:
    """Records which policies have had no effect in this process so far, one sentence each."""
    _write_list(spool, _IDLE, sentences)


def _write_list(spool: Path, name: str, values: list[Any]) -> None:
    path = os.path.join(spool, f"{name}{os.getpid()}")
    with (
        contextlib.suppress(OSError),
        open_private(path, encoding="utf-8") as file,
    ):  # a full disk is no error
        json.dump(values, file)


def read_idle(spool: Path) -> list[str]:
    """Returns which policies have had no effect in any process that tried them, one sentence each."""
    found: list[list[str]] = []
    for path in sorted(spool.glob(f"{_IDLE}*")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return [sentence for sentence in found[0] if all(sentence in others for others in found)] if found else []


def read_refusal(spool: Path) -> str:
    """Returns why the job ended itself, "" if it did not."""
    return _read_mark(spool, _REFUSED)


def read_fault(spool: Path) -> str:
    """Returns the name of the policy that raised the error which ended the job, "" if unknown."""
    return _read_mark(spool, _FAULT)


def _read_mark(spool: Path, name: str) -> str:
    try:
        return (spool / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_applied(spool: Path) -> set[int]:
    """Returns which policies of the plan were applied in any process of the job."""
    numbers: set[int] = set()
    for path in spool.glob(f"{_APPLIED}*"):
        try:
            numbers.update(int(number) for number in json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
    return numbers


def policy_at_fault(error: BaseException) -> str:
    """Returns the name of the policy whose own code raised an error; "" if none did.

    Errors that the job's code, a module's forward or an optimizer raises inside a policy's wrapper are their own. An
    out-of-memory error hits whichever allocation comes last, so it is attributed to no policy.
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
