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


def test_code_and_spawned_processes_are_run_where_torch_is_imported(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the arguments, the name and the import path that they have in a process of their own; other code is not."""
    if request.config.getoption("--cold"):
        pytest.skip("no server is started")
    (tmp_path / "spawns.py").write_text(_SPAWNS)
    code = "import torch, sys, os; print(sys.argv, sys.path[0] == '', __name__, os.getppid())"
    for words in ([sys.executable, "spawns.py"], [sys.executable, "-c", code, "x"]):
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)  # starts the servers
    address = Path(f"{os.environ['WARM_PYTHON']}-job")
    while not address.exists():
        time.sleep(0.1)
    script = tmp_path / "parent.py"
    script.write_text("import os; print(os.getppid())")
    server = subprocess.check_output([sys.executable, str(script)], text=True).strip()
    said = subprocess.check_output([sys.executable, "-c", code, "x"], text=True)
    assert said == f"['-c', 'x'] True __main__ {server}\n"
    # Under PYTHONDONTWRITEBYTECODE, multiprocessing adds -B to the command line of what it spawns.
    written = "import torch, sys, os; print(sys.dont_write_bytecode, os.getppid())"
    assert subprocess.check_output([sys.executable, "-B", "-c", written], text=True) == f"True {server}\n"
    assert subprocess.run([sys.executable, "-c", "import torch; raise SystemExit(7)"], check=False).returncode == 7
    said = subprocess.check_output([sys.executable, "spawns.py"], cwd=tmp_path, text=True)
    assert said == f"ended with 5, below {server}\n"
    plain = subprocess.check_output([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], text=True)
    assert plain == "False\n"


_SPAWNS = """
import multiprocessing, os, sys

def work(queue):
    queue.put(os.getppid() if "torch" in sys.modules else 0)
    queue.close()
    queue.join_thread()
    sys.exit(5)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    parent = queue.get()
    process.join()
    print(f"ended with {process.exitcode}, below {parent}")
"""
