"""Attaching to a job that is running: what it shows and records, what it refuses, and that the job is the same."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, cast

import jsonschema
import pytest
import torch

import memprof
from memprof.cli.main import main
from memprof.launch.attach import inside
from memprof.launch.attach.injection import CannotAttachError, NoAnswerError
from memprof.launch.attach.processes import find_process, list_processes, ranks_below
from memprof.launch.attach.session import _SCRIPT, Session
from memprof.recorder.memory.present import write_present
from memprof.trace.assemble.present import read_present
from memprof.trace.schema import Steps, Storages
from memprof.trace.store import Trace
from tests.json_outputs import read_schema, strict

pytestmark = [
    pytest.mark.cold,  # a warm process is a fork behind a relay, so its PID is not the job's
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="attaching to this Python needs Linux on x86-64",
    ),
]

# It trains until it is told to stop, then again as many steps, to which nothing is attached.
_JOB = """
import pathlib, sys, time, torch
stop = pathlib.Path(sys.argv[1])
def train(goes_on):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters())
    kept, losses = torch.randn(1000, 10), []
    while goes_on(len(losses)):
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 3 and not stop.exists():
            print("ready", flush=True)
    return losses, torch.get_rng_state()
before = set(globals()) | {"attached", "alone", "before"}
attached = train(lambda n: time.sleep(0.005) or not stop.exists())
alone = train(lambda n: n < len(attached[0]))
assert attached[0] == alone[0] and torch.equal(attached[1], alone[1])
print("equal", sorted(set(globals()) - before))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job that trains, and the file that ends it."""
    folder = tmp_path_factory.mktemp("attach")
    script, stop = folder / "train.py", folder / "stop"
    script.write_text(_JOB)
    with subprocess.Popen(
        [sys.executable, str(script), str(stop)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        try:
            find_process(process.pid)
        except CannotAttachError as error:
            process.kill()
            pytest.skip(f"processes may not be traced here: {error}")
        yield process, stop
        process.kill()


def test_dump_names_what_is_alive(job: tuple[subprocess.Popen[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    pid = str(job[0].pid)
    assert main(["attach", pid, "--dump", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(strict(read_schema("attach"))).validate(value)
    (process,) = value["processes"]
    (device,) = process["devices"]
    sizes = {one["category"]: one["bytes"] for one in device["by_category"]}
    weights = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert sizes["parameter"] == weights
    assert sizes["optimizer_state"] == 2 * weights + 4 * 4
    assert 0 < process["host"]["free_bytes"] < process["host"]["total_bytes"]
    assert sizes["input"] >= 4000 * 10  # `kept` is a variable of the job, neither trained nor computed
    assert {one["name"] for one in device["largest"]} >= {"0.weight", "2.weight.exp_avg"}
    assert main(["attach", pid, "--dump"]) == 0
    assert "optimizer_state" in capsys.readouterr().out
    assert job[0].pid in [one.pid for one in list_processes()]


@pytest.mark.slow
def test_records_whole_steps(job: tuple[subprocess.Popen[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "run.memprof"
    assert main(["attach", str(job[0].pid), "-o", str(output), "--steps", "2"]) == 0
    trace = Trace.open(output)
    assert trace.table(Steps).kind.tolist().count("recorded") == 2
    assert trace.manifest.capture.exit_status is None
    assert "the job was still running when this recording ended" in trace.manifest.notes
    categories = set(trace.fullest_step().storages.category.tolist())
    assert {"parameter", "optimizer_state", "gradient", "activation"} <= categories


def test_a_killed_attach_leaves_the_job_training(job: tuple[subprocess.Popen[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "run.memprof"
    command = [sys.executable, "-m", "memprof", "attach", str(job[0].pid), "-o", str(output), "--light"]
    with subprocess.Popen(command) as attach:
        spool = tmp_path / "run.memprof.spool" / f"process-{job[0].pid}"
        while not spool.exists():
            assert attach.poll() is None
            time.sleep(0.01)
        with pytest.raises(CannotAttachError, match="another memprof attach"), Session(job[0].pid, print, 30):
            pass
        attach.send_signal(signal.SIGKILL)
    with Session(job[0].pid, print, 30) as session:  # the lock is free
        session.ask("end")  # what the job would find out by itself soon
        assert session.ask("dump")["processor_s"] > 0


def test_refuses_what_it_cannot_attach_to(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(CannotAttachError, match="is no Python program"):
            find_process(other.pid)
        other.send_signal(signal.SIGSTOP)
        other.kill()
    with pytest.raises(NoAnswerError, match="does not exist, or has ended"):
        find_process(other.pid)
    waiting = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CannotAttachError, match="has not loaded torch"):
            find_process(other.pid)
        other.kill()
    with pytest.raises(CannotAttachError, match="is this command itself"):
        find_process(os.getpid())
    assert main(["attach", str(os.getpid()), "--dump"]) == 2


def test_finds_ranks_whose_launcher_has_the_rank_of_its_pod() -> None:
    script = "for n in 1 0; do RANK=$n LOCAL_RANK=$n sleep 60 & echo $!; done; wait"
    pod = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    with subprocess.Popen(["sh", "-c", script], env=pod, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [int(launcher.stdout.readline()) for _ in range(2)][::-1]
        try:
            until = time.monotonic() + 30  # the shell's forks have its environment until they have become sleep
            while ranks_below(launcher.pid) != ranks and time.monotonic() < until:
                time.sleep(0.01)
            assert ranks_below(launcher.pid) == ranks
            assert ranks_below(ranks[0]) == []
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)


def test_prints_nothing_into_a_job_whose_attach_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    inside.look("", str(tmp_path / "removed by the next attach" / "request-1"), {})
    for thread in threading.enumerate():
        if thread.name == "memprof-attach":
            thread.join()
    assert raised == []


def test_refuses_other_systems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for words in (["--list"], ["1", "--dump"], ["1", "--dump", "--alone"]):
        assert main(["attach", *words]) == 2
        assert "memprof attach needs Linux, and this is darwin" in capsys.readouterr().err


class _Loads:
    """Stands for an object that is loaded when something of it is read."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was read")


class _Gone:
    """What no variable refers to any more."""


def _dump_frozen(folder: Path) -> Storages:
    """Dumps this process; variables of a function that asserts are not read, as pytest has it read them itself."""
    model = torch.nn.Linear(5, 1_237)
    proxies = [_Loads(), weakref.proxy(_Gone())]
    gc.freeze()
    try:
        write_present(folder)
    finally:
        gc.unfreeze()
        del model, proxies
    ((_, tables),) = read_present(folder)
    return cast(Storages, tables[Storages])


def test_finds_what_the_job_has_frozen(tmp_path: Path) -> None:
    """Nothing is read of the job's objects that may run code, or refer to what is gone."""
    found = _dump_frozen(tmp_path / "now")
    is_weight = (found.name == "weight") & (found.requested_bytes == 5 * 1_237 * 4)
    assert found.category[is_weight].tolist() == ["parameter"]


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, object]:
    """What a recording of this process is begun with."""
    (tmp_path / "lock").touch()
    return {"lock": str(tmp_path / "lock"), "spool": str(tmp_path / "spool"), "steps": 1, "light": True}


def _passes_on(error: BaseException, act: Callable[[], object]) -> bool:
    """Whether the job gets what its handler of SIGUSR1 raises while something is done in it."""

    def handle(*_: object) -> None:
        raise error

    former = signal.signal(signal.SIGUSR1, handle)
    caught: BaseException | None = None
    try:
        act()
        time.sleep(5)
    except BaseException as other:  # noqa: BLE001 - the handler's
        caught = other
    finally:
        signal.signal(signal.SIGUSR1, former)
    return caught is error


@pytest.mark.parametrize("error", [TimeoutError("late"), KeyboardInterrupt(), SystemExit(3)])
def test_the_job_gets_what_its_signal_handlers_raise(
    error: BaseException, tmp_path: Path, arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal arrives while it is looked whether the recording can begin: there is another look."""
    recording = inside.Recording(tmp_path, arguments)
    monkeypatch.setattr(inside, "_recording", recording)
    monkeypatch.setattr(inside, "_is_within", lambda _: signal.raise_signal(signal.SIGUSR1))
    recording.is_asked = False
    assert _passes_on(error, recording._call_soon)
    assert not recording.is_asked


def test_the_job_gets_what_its_signal_handlers_raise_in_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception like any other, such as that of a time limit, is raised again behind the request."""
    request, package = str(tmp_path / "request-1"), str(Path(memprof.__file__).parent)
    names = {"folder": str(tmp_path), "package": package, "version": memprof.__version__, "request": request}
    script = _SCRIPT.format(**names, pid=os.getpid(), verb="end", arguments={})
    Path(f"{request}.py").touch()
    monkeypatch.setattr(inside, "_answer", lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    assert _passes_on(TimeoutError("late"), lambda: exec(script, {}))
    assert "TimeoutError: late" in Path(f"{request}.error").read_text()


def test_a_recording_that_cannot_answer_leaves_nothing(tmp_path: Path, arguments: dict[str, object]) -> None:
    """Its folder is gone, or the disk full: no hook stays, and the next attach is not refused."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # not annotated in torch
    before, optimizer = len(hooks), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            inside.begin(str(tmp_path), str(tmp_path / "gone" / "request-1"), arguments)
        assert len(hooks) == before
    del optimizer
    recording = inside.Recording(tmp_path, arguments)
    inside._recording, former = recording, inside._recording
    try:
        with pytest.raises(FileNotFoundError):
            inside.end(str(tmp_path), str(tmp_path / "gone" / "request-2"), {})
    finally:
        inside._recording = former
    assert (recording.is_asked, recording.is_ending) == (False, True)


def test_says_once_why_memprof_cannot_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    hides = "import sys, time, torch; sys.modules['memprof.recorder'] = None; print(flush=True)"
    program = f"{hides}\nwhile True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            main(["attach", str(other.pid), "--dump"])
        finally:
            other.kill()
    assert capsys.readouterr().err.count("cannot import memprof in the job") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_refuses_another_user() -> None:
    with subprocess.Popen(["sleep", "60"], user=65534) as other:
        with pytest.raises(CannotAttachError, match="belongs to user 65534"):
            find_process(other.pid)
        other.kill()


def test_the_job_is_the_same(job: tuple[subprocess.Popen[str], Path]) -> None:
    process, stop = job
    stop.touch()
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out, errors) == (7, "equal []\n", "")
