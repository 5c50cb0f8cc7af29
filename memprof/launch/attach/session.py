"""One attach to one process: its lock, its private folder, the request in the job, and the wait for the answer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from memprof.launch.attach.injection import CannotAttachError, NoAnswerError, inject, run_remotely
from memprof.launch.attach.processes import JobProcess, describe_state, find_process, started_at
from memprof.trace.files.private_file import FOLDER_MODE, make_private_folder, write_private
from memprof.version import __version__

_PACKAGE = str(Path(__file__).resolve().parents[2])
#: How often the answer is looked for, and after how long a wait is explained.
_POLL_S, _EXPLAIN_S = 0.01, 2.0
#: Limits of the job's, which say all: no traceback is shown.
_OF_JOB = ("MemoryError", "OSError", "PermissionError", "RecursionError")
#: The script that the job runs. Its names are its own, and nothing that it raises reaches the job, but what
#: interrupts the job itself. It runs once: a later call finds it gone.
_SCRIPT = """
def run():
    import contextlib, os, sys, importlib.util
    folder, package, version = {folder!r}, {package!r}, {version!r}
    request = {request!r}
    interrupted = None
    def tell(ending, text):
        with contextlib.suppress(OSError):  # a full disk; or the command was killed, and its folder removed by the next
            with open(request + ".new", "w") as file:
                file.write(text)
            os.rename(request + ".new", request + ending)
    def load():
        try:
            import memprof.launch.attach.inside
            answer = ".json", '{{"is_loaded": true}}'
        except BaseException as error:
            answer = ".error", "cannot import memprof in the job: " + repr(error)
        tell(*answer)
    if os.getpid() != {pid}:
        return  # forked in the meantime: the request is its parent's
    try:
        os.unlink(request + ".py")
        known = sys.modules.get("memprof")
        if known is None:
            spec = importlib.util.spec_from_file_location(
                "memprof", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
            )
            known = importlib.util.module_from_spec(spec)
            sys.modules["memprof"] = known
            try:
                spec.loader.exec_module(known)
            except BaseException:
                sys.modules.pop("memprof", None)
                raise
        from memprof.version import __version__
        if __version__ != version:
            raise RuntimeError("the job has loaded memprof " + __version__ + ", and this is " + version)
        if "memprof.launch.attach.inside" in sys.modules:
            sys.modules["memprof.launch.attach.inside"].{verb}(folder, request, {arguments!r})
        else:  # imported beside the job's main thread, which then needs not wait for it
            import threading
            threading.Thread(target=load, daemon=True).start()
    except BaseException as error:
        import traceback
        faults = sys.modules.get("memprof.recorder.faults")
        if not isinstance(error, Exception) or (faults and faults.is_from_signal_handler(error)):
            interrupted = error
        tell(".error", "".join(traceback.format_exception(error)))
    if interrupted is not None:  # by the job's own handler of a signal: raised again behind this script
        import signal, threading
        script = sys._getframe(1)
        def soon():
            again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGURG))
            again.daemon = True
            again.start()
        def raises(_, frame):
            while frame is not None and frame is not script:
                frame = frame.f_back
            if frame is not None:
                return soon()  # on a busy machine, the script has not ended
            signal.signal(signal.SIGURG, former or signal.SIG_DFL)
            raise interrupted
        former = signal.signal(signal.SIGURG, raises)
        soon()
try:
    run()
except BaseException:
    pass
globals().clear()  # the functions and this dictionary refer to each other
"""


class Session:
    """An attach, from the lock to the end. Another one to the same process is refused meanwhile.

    The lock is the system's: it goes with this process, however that ends. The job learns of it by the folder, and
    from this process's id.

    Attributes:
        process: The process.
        folder: The private folder.
        lock: The file that is locked while this process attaches.
    """

    def __init__(self, pid: int, say: Callable[[str], None], wait_s: float) -> None:
        """Checks that the process may be attached to.

        Args:
            pid: The process.
            say: Prints what is waited for.
            wait_s: Longest wait for the job's main thread, in seconds.

        Raises:
            CannotAttachError: It may not be.
            NoAnswerError: It has ended.
        """
        self.process: JobProcess = find_process(pid)
        self._say, self._wait_s = say, wait_s
        self._started = started_at(pid)
        self._count = 0
        self._lock = -1
        self.folder = self.lock = Path()

    def __enter__(self) -> Self:
        """Takes the lock and makes the folder.

        Raises:
            CannotAttachError: Another attach is under way.
        """
        base = Path(tempfile.gettempdir()) / f"memprof-attach-{os.geteuid()}"
        make_private_folder(base)
        if base.is_symlink() or base.stat().st_uid != os.geteuid() or base.stat().st_mode & 0o077:
            raise CannotAttachError(f"{base} is not a private folder of this user: remove it, or set TMPDIR.")
        name = f"{self.process.pid}-{self._started}"
        self.lock = base / f"{name}.lock"
        until = time.monotonic() + _EXPLAIN_S / 2  # a job whose attach was killed looks for a moment whether it is free
        while not self._takes_lock():
            if time.monotonic() > until:
                raise CannotAttachError(
                    f"another memprof attach to process {self.process.pid} is under way: end it first."
                )
            time.sleep(_POLL_S)
        for old in base.glob("*-*-*"):  # of attaches that were killed, to this process or to others that have ended
            pid, started = old.name.split("-")[:2]
            if f"{pid}-{started}" == name or started_at(int(pid)) != started:
                shutil.rmtree(old, ignore_errors=True)
            if started_at(int(pid)) != started:
                (base / f"{pid}-{started}.lock").unlink(missing_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
        os.chmod(self.folder, FOLDER_MODE)
        return self

    def _takes_lock(self) -> bool:
        self._lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locks(self._lock):
            with suppress(FileNotFoundError):  # the one before has removed the file that was locked here
                if os.path.samestat(os.fstat(self._lock), os.stat(self.lock)):
                    return True
        os.close(self._lock)
        return False

    def __exit__(self, *_: object) -> None:
        """Removes the folder and gives up the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.unlink(missing_ok=True)
        os.close(self._lock)

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Has the job's main thread run a function of ``inside``, once it is imported, and returns its answer.

        Raises:
            CannotAttachError: The job's Python does not permit it.
            NoAnswerError: The job ended, or its main thread did not come to the request in time.
        """
        answer = self._ask(verb, arguments)
        return self._ask(verb, arguments) if answer.get("is_loaded") else answer

    def check_threads(self, *, in_one: bool) -> None:
        """Checks that no thread trains while another looks at the same models and gradients, which may end the job.

        Args:
            in_one: One thread may train that is not the main one: the thread that is recorded.

        Raises:
            CannotAttachError: Several do.
            NoAnswerError: As in `ask`.
        """
        found = self.ask("look")
        if found["threads"] > 1 or (found["others"] and not in_one):
            who = f"{found['threads']} threads train" if found["threads"] > 1 else "a thread beside the main one trains"
            raise CannotAttachError(
                f"in process {self.process.pid} {who}, and to look at their gradients meanwhile is not safe: start the "
                "job with memprof record."
            )

    def _ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        request = self.folder / f"request-{self._count}"
        script = _SCRIPT.format(
            folder=str(self.folder),
            package=_PACKAGE,
            version=__version__,
            request=str(request),
            pid=self.process.pid,
            verb=verb,
            arguments=arguments,
        )
        place = Path(f"{request}.py")
        write_private(place, script)
        if self.process.is_remote:
            try:
                run_remotely(self.process.pid, place)
            except CannotAttachError:
                if self.is_running():
                    raise
                raise NoAnswerError(f"process {self.process.pid} ended before it answered.") from None
        else:
            inject(self.process.pid, _one_line(str(place)))
        try:
            self.wait_for(lambda: _is_answered(request), "the job's main thread to take the request", self._wait_s)
        finally:
            place.unlink(missing_ok=True)  # a job that comes to it later finds nothing to do
        error = Path(f"{request}.error")
        if error.exists():
            last = error.read_text(encoding="utf-8", errors="replace").strip()
            reason, _, why = last.splitlines()[-1].partition(": ")
            if reason.endswith(".RefusedError"):
                raise CannotAttachError(f"process {self.process.pid}: {why}.")
            text = "" if reason in _OF_JOB or "\n" not in last else f"\n{last}"
            raise NoAnswerError(f"the job could not answer: {reason}{': ' if why else ''}{why}.{text}")
        answer: dict[str, Any] = json.loads(Path(f"{request}.json").read_text(encoding="utf-8"))
        return answer

    def wait_for(self, is_done: Callable[[], bool], what: str, wait_s: float | None) -> None:
        """Waits until something is done.

        Args:
            is_done: Whether it is.
            what: What is waited for, for the message after two seconds; "" for none.
            wait_s: For how long at most; None for as long as the job runs.

        Raises:
            NoAnswerError: The job ended, or the time is over.
        """
        begun, has_said = time.monotonic(), False
        while not is_done():
            if not self.is_running():
                if is_done():
                    return
                raise NoAnswerError(f"process {self.process.pid} ended before it answered.")
            waited = time.monotonic() - begun
            if wait_s is not None and waited > wait_s:
                raise NoAnswerError(
                    f"process {self.process.pid} did not answer within {wait_s:g} s: "
                    f"{describe_state(self.process.pid)}. Try again, or wait longer with --wait."
                )
            if what and waited > _EXPLAIN_S and not has_said:
                has_said = True
                self._say(f"waiting for {what}: {describe_state(self.process.pid)}")
            time.sleep(_POLL_S)

    def is_running(self) -> bool:
        """Whether the job's process is still the same."""
        return started_at(self.process.pid) == self._started


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_answered(request: Path) -> bool:
    return Path(f"{request}.json").exists() or Path(f"{request}.error").exists()


def _one_line(path: str) -> str:
    """Returns code that runs a script if it is there; it raises nothing and leaves no name in the job's module."""
    return (
        f"try: exec(__import__('pathlib').Path({path!a}).read_bytes(),{{'__name__':'memprof attach'}})\n"
        "except BaseException: pass\n"
    )
