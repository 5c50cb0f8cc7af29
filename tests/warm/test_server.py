"""The servers to which tests hand the processes that they start."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_processes_that_are_killed_while_they_hand_over_leave_the_server_running(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Before they have sent anything, and within a request."""
    if request.config.getoption("--cold"):
        pytest.skip("no server is started")
    script = tmp_path / "parent.py"
    script.write_text("import os; print(os.getppid())")
    command = [sys.executable, str(script)]
    subprocess.run(command, check=True, capture_output=True)  # starts the servers, if no test has done so yet
    address = Path(f"{os.environ['WARM_PYTHON']}-job")
    while not address.exists():
        time.sleep(0.1)
    before = int(subprocess.check_output(command))
    assert before != os.getpid()
    for sent in (b"", b"1", struct.pack("=i", 100), struct.pack("=i", 100) + b"{"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.connect(str(address))
            killed.sendall(sent)
        assert int(subprocess.check_output(command)) == before
