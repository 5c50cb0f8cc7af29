"""Every program in ``scripts`` behaves under ``memprof record`` as it does without it."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memprof.trace.schema import Ops
from memprof.trace.store import Trace
from tests.conformance.running import MODES, Job, command, run_both, with_plain_run


@dataclass(frozen=True)
class Case:
    """One program to compare.

    Attributes:
        words: What to type after ``python`` or ``memprof record``.
        returncode: The exit status that Python gives it, negative for a signal.
        is_recorded: It trains, so there must be a recording: a recorder that did not run would change nothing either.
        stdin: What to type into it.
        environment: Variables to set.
        descriptor: What to offer on descriptor 63.
        is_cold: How the interpreter starts, ends or is seen matters; else only what happens in training does, and
            processes may be forks of one that has imported torch.
    """

    words: tuple[str, ...]
    returncode: int = 0
    is_recorded: bool = False
    stdin: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    descriptor: bytes | None = None
    is_cold: bool = True

    @property
    def job(self) -> Job:
        """What to run."""
        return Job(self.words, stdin=self.stdin, environment=self.environment, descriptor=self.descriptor)

    def __str__(self) -> str:
        """Names the case in pytest's output."""
        return " ".join([*(f"{key}=" for key in self.environment), *self.words])


def plain(words: str, returncode: int = 0, **more: object) -> Case:
    """Makes the case of a program that does not train."""
    return Case(tuple(words.split()), returncode, **more)  # type: ignore[arg-type]


def whole(words: str, returncode: int = 0, **more: object) -> Case:
    """Makes the case of a program that trains, compared from the start of its interpreter to its end."""
    return Case(tuple(words.split()), returncode, is_recorded=True, **more)  # type: ignore[arg-type]


def training(words: str, returncode: int = 0, **more: object) -> Case:
    """Makes the case of a program of which only the training is compared."""
    return Case(tuple(words.split()), returncode, is_recorded=True, is_cold=False, **more)  # type: ignore[arg-type]


def python(words: str, returncode: int = 0) -> Case:
    """Makes the case of a program after a command line of Python's own."""
    return Case(command(*words.split()), returncode)


#: Where tests/conformance/scripts/runs_out_of_memory.py may be told to run out of memory, and its exit status.
OUT_OF_MEMORY = {
    "first": 1,
    "forward": 1,
    "backward": 1,
    "optimizer": 1,
    "late": 1,
    "retried": 0,
    "handled": 3,
    "chained": 1,
}

#: What a thread of the profiler's library leaves to malloc would serve a request beyond the limit.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}

CASES = [
    # Memory runs out: the same error, traceback and status, and a job that goes on has its memory back.
    *(
        training(f"runs_out_of_memory.py {place}", status, environment=ONE_ARENA)
        for place, status in OUT_OF_MEMORY.items()
    ),
    plain("runs_out_of_memory.py build", 1, environment=ONE_ARENA),
    # What a program is told about itself.
    plain("main_attributes.py"),
    plain("main_attributes.py one --two -- three -o -m"),
    plain("./main_attributes.py -q"),
    Case(("main_attributes.py", "", "two words", "ünï", "*", "--steps=3")),
    plain("-m package --skip 5 -- x"),
    plain("-m package.part -h", 1),
    plain("-m absent_package", 1),
    plain("-m package.absent", 1),
    plain("zipped_folder one"),
    plain("interpreter_state.py"),
    plain("process_state.py"),
    plain("process_state.py", environment={"PYTHONPATH": "own_site:/nowhere", "KINETO_LOG_LEVEL": "5"}),
    # How it ends.
    plain("exit_with.py 0"),
    plain("exit_with.py 3", 3),
    plain("exit_with.py 256", 0),
    plain("exit_with.py -1", 255),
    plain("exit_with.py None"),
    plain("exit_with.py True", 1),
    plain("exit_with.py 'text'", 1),
    plain("exit_with.py [1]", 1),
    plain("uncaught.py", 1),
    plain("syntax_error.py", 1),
    plain("exception_group.py", 1),
    plain("leave_at_once.py", 7),
    plain("exit_order.py"),
    plain("fails_at_exit.py"),
    # Signals.
    plain("signal_itself.py SIGTERM", -signal.SIGTERM),
    plain("signal_itself.py SIGKILL", -signal.SIGKILL),
    plain("signal_itself.py SIGHUP", -signal.SIGHUP),
    plain("signal_itself.py SIGABRT", -signal.SIGABRT),
    plain("signal_itself.py SIGUSR1", -signal.SIGUSR1),
    plain("interrupted.py", -signal.SIGINT),
    plain("own_handlers.py"),
    plain("signal_group.py"),
    # Input, output, children, warnings.
    plain("reads_stdin.py", stdin=b"me\nline\nrest\x00\xff"),
    plain("reads_descriptor.py", descriptor=b"through a descriptor"),
    plain("buffers.py"),
    plain("warns.py"),
    plain("warns.py", environment={"PYTHONWARNINGS": "default"}),
    plain("warns.py", 1, environment={"PYTHONWARNINGS": "error"}),
    plain("warns.py", environment={"PYTHONDEVMODE": "1"}),
    plain("python_children.py"),
    plain("forks.py"),
    plain("sees_own_site.py"),
    plain("sees_own_site.py", environment={"PYTHONPATH": "own_site"}),
    plain("sees_own_site.py", environment={"PYTHONPATH": "own_site", "BREAK_SITE": "1"}),
    # Commands.
    python("-u main_attributes.py -- -u"),
    python("-I main_attributes.py"),
    python("-W error warns.py", 1),
    python("-c print(__name__)"),
    python("absent.py", 2),
    Case(("--", "sh", "-c", "echo $0 $1; $0 exit_with.py 3; kill -TERM $$", sys.executable, "one"), -signal.SIGTERM),
    # torch.
    plain("never_trains.py"),
    plain("torch_as_found.py"),
    whole("looks_at_modules.py"),
    plain("torch_is_broken.py", 1, environment={"PYTHONPATH": "broken_torch"}),
    training("trains.py"),
    Case(command("-u", "trains.py"), is_recorded=True),
    training("checkpoints.py"),
    whole("compiles.py"),
    training("fails_in_forward.py shape", 1),
    training("fails_in_forward.py python", 1),
    whole("fails_in_forward.py exit", 11),
    training("fails_in_forward.py caught"),
    training("fails_in_forward.py operator", 1),
    training("fails_in_forward.py from_cause", 1),
    training("fails_in_backward.py hook", 1),
    training("fails_in_backward.py accumulated", 1),
    whole("fails_in_backward.py function", 1),
    training("fails_in_backward.py module_hook", 1),
    training("fails_in_backward.py twice", 1),
    training("fails_in_backward.py in_place", 1),
    training("fails_in_optimizer.py own", 1),
    training("fails_in_optimizer.py state", 1),
    whole("fails_between_steps.py raise", 1),
    whole("fails_between_steps.py exit", 1),
    whole("ends_in_step.py exit", 7),
    whole("ends_in_step.py SIGTERM", -signal.SIGTERM),
    whole("ends_in_step.py SIGKILL", -signal.SIGKILL),
    training("ends_in_step.py SIGINT", -signal.SIGINT),
    whole("handles_signals_in_step.py", 6),
    training("loads_data.py fork works"),
    whole("loads_data.py spawn works"),
    training("loads_data.py fork fails", 1),
    training("runs_threads.py"),
    whole("trains_in_thread.py"),
    whole("imports_nothing.py"),
    training("own_modes.py"),
    whole("looks_at_stack.py"),
    training("warns_in_step.py"),
    training("holds_references.py"),
    training("saves_and_copies.py"),
]


#: Cases that others hold in the main, left to `make test-all`. What stays is one of each kind: of errors in every
#: place of a step, of signals, of threads, of workers, of what a program can see of the interpreter.
_SLOW = (
    "-u trains.py",
    "./main_attributes.py",
    "-I main_attributes.py",
    "-c print",
    "PYTHONDEVMODE=",
    "PYTHONWARNINGS= warns.py",
    "exception_group.py",
    "exit_with.py -1",
    "exit_with.py 0",
    "exit_with.py [1]",
    "main_attributes.py one",
    "never_trains.py",
    "package.absent",
    "package.part",
    "signal_itself.py SIGABRT",
    "zipped_folder",
    "checkpoints.py",
    "compiles.py",
    "ends_in_step.py SIGKILL",
    "ends_in_step.py SIGTERM",
    "exit_with.py 256",
    "exit_with.py True",
    "exit_with.py None",
    "fails_between_steps.py",
    "fails_in_backward.py accumulated",
    "fails_in_backward.py function",
    "fails_in_backward.py hook",
    "fails_in_backward.py in_place",
    "fails_in_backward.py module_hook",
    "fails_in_backward.py twice",
    "fails_in_forward.py caught",
    "fails_in_forward.py exit",
    "fails_in_forward.py operator",
    "fails_in_forward.py python",
    "fails_in_forward.py shape",
    "fails_in_optimizer.py own",
    "imports_nothing.py",
    "loads_data.py fork fails",
    "loads_data.py spawn works",
    "runs_out_of_memory.py build",
    "runs_out_of_memory.py chained",
    "runs_out_of_memory.py first",
    "runs_out_of_memory.py forward",
    "runs_out_of_memory.py handled",
    "runs_out_of_memory.py late",
    "runs_out_of_memory.py optimizer",
    "signal_itself.py SIGHUP",
    "signal_itself.py SIGUSR1",
    "trains_in_thread.py",
)


def _marked(case: Case) -> Any:
    is_slow = any(name in str(case) for name in _SLOW)
    marks = [with_plain_run(str(case)), *[pytest.mark.slow] * is_slow, *[pytest.mark.cold] * case.is_cold]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_behaves_as_without_memprof(case: Case, tmp_path: Path) -> None:
    """Exit status or signal, stdout, stderr and files are those of the plain run, byte for byte."""
    without, under = run_both(tmp_path, case.job)
    assert without.returncode == case.returncode, without.stderr.decode()
    assert under.stderr.decode(errors="replace") == without.stderr.decode(errors="replace")
    assert under.stdout.decode(errors="replace") == without.stdout.decode(errors="replace")
    assert sorted(under.files) == sorted(without.files)
    assert [name for name, content in under.files.items() if content != without.files[name]] == []
    assert under.returncode == without.returncode
    recording = tmp_path / "run.memprof"
    assert recording.exists() == case.is_recorded
    if case.is_recorded:
        assert len(Trace.open(recording).table(Ops))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[] if words.endswith("shape") else [pytest.mark.slow])
        for words in (
            "fails_in_forward.py shape",
            "fails_in_forward.py caught",
            "fails_in_forward.py operator",
            "fails_in_backward.py twice",
            "fails_in_optimizer.py own",
        )
    ],
)
def test_an_error_under_remat_is_the_job_s_own(words: str, tmp_path: Path) -> None:
    """An error of an operator has the traceback that it has without memprof, which runs every operator under remat."""
    without, under = run_both(tmp_path, Job(tuple(words.split())), MODES["remat"])
    assert under.stderr.decode() == without.stderr.decode()
    assert under == without
