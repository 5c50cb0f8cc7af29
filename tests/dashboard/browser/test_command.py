"""`memprof dashboard` as a command: the port, the browser, and a recording that is going on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from werkzeug.serving import make_server

from memprof.errors import BadInputError, UsageError
from memprof_dashboard.app import create_app
from memprof_dashboard.serve import open_started, serve
from memprof_dashboard.sources import Source, Workspace, open_sources
from tests.dashboard.browser.conftest import Served, Shown

#: Trains four steps, waits for a signal to go on, and goes on until a signal to stop.
ENDLESS = """
import pathlib, time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
    while step == 4 and not pathlib.Path("go").exists():
        time.sleep(0.05)
    time.sleep(0.02)
    if pathlib.Path("stop").exists():
        break
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@contextmanager
def dashboard(*arguments: str, until: str = "Ctrl-C", **environment: str) -> Iterator[tuple[str, str]]:
    """Runs the command; yields its address and what it said before and with it."""
    command = [sys.executable, "-m", "memprof_dashboard", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment or None) as process:
        assert process.stderr is not None
        said = ""
        while until not in said:
            line = process.stderr.readline()
            assert line, f"ended with {process.wait()}: {said}"
            said += line
        try:
            yield re.findall(r"http://\S+", said)[0], said
        finally:
            process.terminate()


def test_a_port_that_is_taken(small_file: Path) -> None:
    """If the port is taken, the next free one is used and printed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with dashboard(str(small_file), "--no-browser", "--port", str(port)) as (address, said):
            assert f"port {port} is taken" in said
            assert int(address.rpartition(":")[2].partition("/")[0]) > port


def test_no_browser_leaves_the_address(small_file: Path, tmp_path: Path) -> None:
    """Without a browser, a message is printed and the page is still served."""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "BROWSER": ""}
    with dashboard(str(small_file), "--port", "0", until="no browser found", **environment) as (address, _):
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address) as answer:
            assert b"_dash-config" in answer.read()


def test_what_the_address_waits_for(small_file: Path) -> None:
    """It is printed before what reads a recording is imported; IPython, which dash would import, never is."""
    program = """
import sys
from pathlib import Path
from memprof_dashboard import serve
serve._make = lambda *_, **__: None
def said(sentence):
    if "http://" in sentence:
        analyses = [name for name in sys.modules if name.startswith(("memprof.planners", "memprof.trace.importers"))]
        late = ("dash", "IPython", "numpy", "pyarrow", "memprof_dashboard.app", *analyses)
        print([name for name in late if name in sys.modules])
        import IPython, os
        os._exit(0)
serve.serve([Path(sys.argv[1])], port=0, opens_browser=False, say=said)
"""
    command = [sys.executable, "-u", "-c", program, str(small_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['dash']\n"


@contextmanager
def recorded(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Records the endless job in a folder; yields it before its fifth step, and has it end."""
    (folder / "train.py").write_text(ENDLESS)
    options = ["-o", "run.memprof", "--skip", "1", "--steps", "1000", "train.py"]
    command = [sys.executable, "-m", "memprof", "record", *options]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | ONE_THREAD
    ) as job:
        assert job.stdout is not None
        try:
            while not job.stdout.readline().startswith("step 4"):
                assert job.poll() is None
            yield job
        finally:
            (folder / "go").touch()
            (folder / "stop").touch()
            job.stdout.read()


@contextmanager
def following(sources: list[Source], *pages: Callable[..., Shown]) -> Iterator[list[Any]]:
    """Serves recordings; yields a page for each way to show one, and closes them before the server ends."""
    server = make_server("127.0.0.1", 0, create_app(sources, token="t").server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served = Served(f"http://127.0.0.1:{server.port}", "t", Workspace(sources))
    shown = [show(served).page for show in pages]
    try:
        yield shown
    finally:
        for page in shown:
            page.goto("about:blank")  # it asks every second: not of a server that is gone
        server.shutdown()
        server.server_close()


def test_pages_follow_a_job_that_is_running(show: Callable[..., Shown], tmp_path: Path) -> None:
    """The spool of a recording that goes on: operators recorded later appear in every tab; then the packed file."""
    with recorded(tmp_path) as job:
        sources = open_sources([tmp_path / "run.memprof.spool"])
        before = sources[0].rank(-1).history.ops
        assert before > 0
        with following(sources, show, show) as pages:
            (tmp_path / "go").touch()
            for page in pages:  # asked by time: a page behind another one gets no animation frames
                page.wait_for_function(
                    "ops => document.querySelector('#overview .js-plotly-plot')?.layout?.xaxis?.range?.[1] > ops",
                    arg=before,
                    polling=500,
                )
                # Nobody has chosen a range, so the page goes on to the newest of steps that are equally high.
                page.wait_for_function(
                    "ops => document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range[1] > ops",
                    arg=before,
                    polling=500,
                )
            assert job.poll() is None
            assert [page.inner_text("#badge") for page in pages] == ["● live", "● live"]
            (tmp_path / "stop").touch()
            assert job.stdout is not None
            job.stdout.read()
            for page in pages:
                page.wait_for_function(
                    "() => document.querySelector('#badge').textContent === 'recording finished'"
                    " && document.querySelector('header .only').textContent === 'run.memprof'",
                    polling=500,
                )
    assert job.returncode == 0
    assert sources[0].path == tmp_path / "run.memprof"
    assert not sources[0].is_growing


def test_page_says_that_a_job_was_killed(show: Callable[..., Shown], tmp_path: Path) -> None:
    """Where memprof and the job are killed, nobody finishes the recording: the page says so instead of waiting."""
    with recorded(tmp_path) as job:
        sources = open_sources([tmp_path / "run.memprof.spool"])
        with following(sources, show) as (page,):
            page.wait_for_function("() => document.querySelector('#badge').textContent === '● live'")
            assert "the job is still running" in page.inner_text("#facts")
            (process,) = (tmp_path / "run.memprof.spool").glob("process-*/")
            job.kill()
            os.kill(int(process.name.removeprefix("process-")), signal.SIGKILL)
            ended = "the job ended without finishing its recording"
            page.wait_for_function("text => document.querySelector('#badge').textContent === text", arg=ended)
            page.wait_for_function("text => document.querySelector('#facts').textContent.includes(text)", arg=ended)
    assert sources[0].is_spool
    assert not sources[0].is_growing


def test_a_job_killed_before_its_first_step_is_not_waited_for(tmp_path: Path) -> None:
    """The command waits for a job that runs, and ends with a sentence once the job is gone."""
    spool = tmp_path / "run.memprof.spool"
    spool.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        launch = {"command": ["train.py"], "parent_pid": parent.pid, "started_us": time.time() * 1e6}
        (spool / "launch.json").write_text(json.dumps(launch))
        with pytest.raises(BadInputError, match=r"train\.py ended without finishing its recording"):
            open_started([spool], lambda _: parent.kill())
        assert parent.wait() < 0


def test_what_cannot_be_opened_ends_the_command(tmp_path: Path) -> None:
    """An error message without a traceback."""
    (tmp_path / "x.memprof").write_bytes(b"hello")
    done = subprocess.run(
        [sys.executable, "-m", "memprof_dashboard", str(tmp_path / "x.memprof")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "x.memprof" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "change", [{"schema_version": 99}, {"schema_version": None}, "manifest.json", "rank0/manifest.json"]
)
def test_no_address_is_printed_for_what_is_no_recording(small_file: Path, tmp_path: Path, change: Any) -> None:
    """A zip of a newer memprof, or one whose manifests are damaged: one sentence, and no page that cannot be shown."""
    path = tmp_path / "other.memprof"
    with zipfile.ZipFile(small_file) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "manifest.json" and isinstance(change, dict):
                content = json.dumps(json.loads(content) | change).encode()
            new.writestr(name, b"{" if name == change else content)
    with pytest.raises(BadInputError, match=r"other\.memprof"):
        serve([path], port=0, opens_browser=False, say=pytest.fail)


def test_an_app_that_cannot_be_made_ends_the_command(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised where the command waits; the server does not answer without an app for good."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise ValueError("no app")

    monkeypatch.setattr("memprof_dashboard.app.create_app", fail)
    with pytest.raises(ValueError, match="no app"):
        serve([small_file], port=0, opens_browser=False, say=lambda _: None)


def test_an_unknown_editor_is_refused_before_a_job_is_waited_for(tmp_path: Path) -> None:
    """The spool of a job that runs, and has not trained yet."""
    spool = tmp_path / "run.memprof.spool"
    spool.mkdir()
    launch = {"command": ["train.py"], "parent_pid": os.getpid(), "started_us": time.time() * 1e6}
    (spool / "launch.json").write_text(json.dumps(launch))
    with pytest.raises(UsageError, match="unknown editor 'typo'"):
        serve([spool], editor="typo", port=0, opens_browser=False, say=pytest.fail)


def test_a_recording_that_changed_is_read_again(small_file: Path) -> None:
    """What was read is kept until the file is another one."""
    (source,) = open_sources([small_file])
    before = source.rank(-1)
    assert source.refresh() is False
    assert source.rank(-1) is before
    os.utime(small_file, (1, 1))
    assert source.refresh() is True
    assert source.rank(-1) is not before


def test_a_recording_that_cannot_be_read_just_now_is_read_later(
    small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that failed counts for nothing: the next one reads the same file."""
    (source,) = open_sources([small_file])
    source.refresh()
    os.utime(small_file, (1, 1))

    def fail(path: Path) -> NoReturn:
        raise BadInputError(f"{path} is being written.")

    with monkeypatch.context() as patched:
        patched.setattr("memprof_dashboard.sources._open", fail)
        with pytest.raises(BadInputError, match="is being written"):
            source.refresh()
    assert source.refresh() is True


def test_a_recording_that_is_gone_is_told(small_file: Path) -> None:
    """Its sentence names it."""
    (source,) = open_sources([small_file])
    small_file.unlink()
    with pytest.raises(BadInputError, match=r"run\.memprof cannot be read any more"):
        source.refresh()
