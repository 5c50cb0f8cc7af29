"""`memprof dashboard` as a command: the port, the browser, and a recording that is going on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memprof.errors import BadInputError
from memprof_dashboard.sources import open_sources


@contextmanager
def dashboard(*arguments: str, **environment: str) -> Iterator[tuple[str, str]]:
    """Runs the command; yields its address and what it said before and with it."""
    command = [sys.executable, "-m", "memprof_dashboard", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment or None) as process:
        assert process.stderr is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stderr.readline()
            assert line, f"ended with {process.wait()}: {said}"
            said += line
        try:
            yield re.findall(r"http://\S+", said)[0], said
        finally:
            process.terminate()


def test_a_port_that_is_taken(small_file: Path) -> None:
    """The next free one is taken, and that is said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with dashboard(str(small_file), "--no-browser", "--port", str(port)) as (address, said):
            assert f"Port {port} is taken" in said
            assert int(address.rpartition(":")[2].partition("/")[0]) > port


def test_what_cannot_be_opened_ends_the_command(tmp_path: Path) -> None:
    """With a sentence and no traceback."""
    (tmp_path / "x.memprof").write_bytes(b"hello")
    done = subprocess.run(
        [sys.executable, "-m", "memprof_dashboard", str(tmp_path / "x.memprof")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "x.memprof" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recording_that_changed_is_read_again(small_file: Path) -> None:
    """What was read is kept until the file is another one."""
    (source,) = open_sources([small_file])
    before = source.rank(-1)
    assert source.refresh() is False
    assert source.rank(-1) is before
    os.utime(small_file, (1, 1))
    assert source.refresh() is True
    assert source.rank(-1) is not before


def test_a_recording_that_is_gone_is_told(small_file: Path) -> None:
    """Its sentence names it."""
    (source,) = open_sources([small_file])
    small_file.unlink()
    with pytest.raises(BadInputError, match=r"run\.memprof cannot be read any more"):
        source.refresh()
