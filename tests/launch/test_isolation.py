"""`memprof suggest --check`: the job it runs changes no file in its folder and reaches no network."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.launch.dry.rank_processes import command_apart, why_not_apart
from tests.warm import client

WRITING = """
import os, socket, sys, torch
torch.manual_seed(0)
data = open("data.txt").read()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    model(torch.randn(256, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("log.txt", "a") as log:
        log.write("step\\n")
    if len(sys.argv) > 1:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5).close()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside = tmp_path / "job"
    inside.mkdir()
    (inside / "train.py").write_text(WRITING)
    (inside / "data.txt").write_text("kept\n")
    monkeypatch.chdir(inside)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if reason := why_not_apart():
        pytest.skip(f"this machine runs nothing apart: {reason}")
    return inside


def run_apart(scratch: Path, *command: str) -> subprocess.CompletedProcess[str]:
    scratch.mkdir(exist_ok=True)
    return subprocess.run([*command_apart(scratch), *command], capture_output=True, text=True, timeout=60)


def test_files_are_read_as_they_are_and_written_elsewhere(folder: Path, tmp_path: Path) -> None:
    """What is there can be read, changed and removed, and is there afterwards as it was."""
    script = "cat data.txt; echo new > data.txt; echo more > more.txt; rm train.py; ls; cat data.txt"
    done = run_apart(tmp_path / "scratch", "sh", "-c", script)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["kept", "data.txt", "more.txt", "new"], "", 0)
    assert sorted(path.name for path in folder.iterdir()) == ["data.txt", "train.py"]
    assert (folder / "data.txt").read_text() == "kept\n"


def test_the_command_is_as_it_would_be_otherwise(folder: Path, tmp_path: Path) -> None:
    """User, folder, environment, exit status and the signals it may get."""
    script = "id -u; id -g; pwd; echo $ONE; grep SigIgn /proc/self/status; exit 7"
    plain = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={**os.environ, "ONE": "1"})
    os.environ["ONE"] = "1"
    try:
        done = run_apart(tmp_path / "scratch", "sh", "-c", script)
    finally:
        del os.environ["ONE"]
    assert (done.stdout, done.returncode) == (plain.stdout, 7)
    killed = run_apart(tmp_path / "another", "sh", "-c", "kill -TERM $$")
    assert killed.returncode == -signal.SIGTERM


def test_processes_reach_one_another_and_nobody_else(folder: Path, tmp_path: Path) -> None:
    """A server of the machine's is out of reach; ranks of the job meet over the loopback of their own."""
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert subprocess.run([sys.executable, "-c", connect]).returncode == 0
        refused = run_apart(tmp_path / "scratch", sys.executable, "-c", connect)
    assert "ConnectionRefusedError" in refused.stderr
    between = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    assert run_apart(tmp_path / "another", sys.executable, "-c", between).returncode == 0


def test_where_it_cannot_be_had_a_sentence_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files below the job's would hide its own recording; some names overlayfs cannot take."""
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    assert why_not_apart() == "the folder for temporary files is inside this one"
    monkeypatch.undo()
    odd = folder.parent / "a,b"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert why_not_apart() == "the name of this folder contains a comma, a colon or a backslash"


def test_a_check_leaves_the_folder_as_it_was(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job's log has only the lines of the recorded run; the command is printed first."""
    record()
    before = (folder / "log.txt").read_text()
    capfd.readouterr()
    assert main(["suggest", "run.memprof", "--budget", "90%", "--allow", "swap", "--check"]) == 0
    said = capfd.readouterr().err
    command = "python train.py"
    assert f"--check dry-runs {command} without a network; files it writes in this folder are discarded." in said
    assert (folder / "log.txt").read_text() == before
    (folder / "pyproject.toml").write_text("[tool.memprof.dry_run]\nisolate = false\n")
    with client.enabled():
        assert main(["suggest", "run.memprof", "--budget", "90%", "--allow", "swap", "--check"]) == 0
    said = capfd.readouterr().err
    assert f"--check dry-runs {command} in this folder, where it may write, with its network" in said
    assert len((folder / "log.txt").read_text()) > len(before)


def test_a_job_that_needs_a_network_is_told_that_it_had_none(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is named, with the way to leave it the network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept_all, args=(server,), daemon=True).start()
        record(str(server.getsockname()[1]))
        capfd.readouterr()
        main(["suggest", "run.memprof", "--budget", "90%", "--allow", "optimizer", "--check"])
        said = capfd.readouterr().out
    assert "ConnectionRefusedError" in said
    assert "It had no network; isolate = false under [tool.memprof.dry_run]" in said


def record(*words: str) -> None:
    command = [sys.executable, "-m", "memprof", "record", "-q", "-o", "run.memprof", "train.py", *words]
    with client.enabled():
        subprocess.run(command, check=True, timeout=240)


def accept_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return
