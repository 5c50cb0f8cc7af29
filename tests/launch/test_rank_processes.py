"""Ranks forked from a process that has imported torch, and ranks started anew: the same recordings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memprof.analysis.ranks.rank_report import compare_ranks
from memprof.trace.schema import Holders
from memprof.trace.store import Trace
from tests.recorder.recorded import record

#: The processes that tests share would have imported torch before the bootstrap could.
pytestmark = pytest.mark.cold

JOB = """
import os, sys
forked = "sympy" in sys.modules and "torch" not in sys.modules
{first}
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
assert torch.__spec__.name == "torch" and torch.__spec__.loader is torch.__loader__
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
print("forked" if forked else "anew", sys.argv[1:], os.environ.get("TORCH_SHOW_CPP_STACKTRACES"), flush=True)
net = torch.nn.Sequential(torch.nn.Linear(32, 64 + rank), torch.nn.Linear(64 + rank, 32)).cuda()
for layer in net:
    fully_shard(layer)
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(5):
    net(torch.randn(8, 32, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {last}
"""
_RANKS = ("--dry-run", "--device", "rtx4090", "--ranks", "2")


def _write(folder: Path, first: str = "", last: str = "pass") -> None:
    (folder / "job.py").write_text(JOB.format(first=first, last=last))


def _contents(trace: Trace) -> list[object]:
    """Returns what must not depend on how ranks are started: peaks, operators and storages of each rank's steps."""
    found: list[object] = [[(one.rank, one.peak_bytes) for one in compare_ranks(trace).ranks]]
    for rank in trace.ranks:
        one = trace.rank_trace(rank)
        step = one.steady_step()
        found += [one.manifest_of(rank).same_ranks, list(step.ops.name), list(step.storages.requested_bytes)]
        found.append(sorted(one.table(Holders).chain))
    return found


def test_a_forked_rank_records_what_one_started_anew_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the script's own, by the name of a package of torch's, may hide it: then nothing is forked.

    The script looks whether torch is installed, as transformers and datasets do. What was imported before the fork is
    left out of garbage collections, and all the same the variable that holds more with each step is found. Threads of
    numpy's OpenBLAS, one for each core where these tests do not limit them, keep nothing from being forked.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    installed = 'from importlib.util import find_spec; assert find_spec("torch").origin.endswith(".py"); kept = []'
    _write(tmp_path, first=installed, last="kept.append(torch.ones(1000, device='cuda') * step)")
    forked = record(tmp_path, *_RANKS, "--steps", "3", "job.py", "a", "b c")
    assert forked.stdout == "forked ['a', 'b c'] None\n"
    (tmp_path / "torchgen").mkdir()
    anew = record(tmp_path, *_RANKS, "--steps", "3", "job.py", "a", "b c")
    assert anew.stdout == "anew ['a', 'b c'] None\n"
    assert _contents(forked.trace) == _contents(anew.trace)
    assert any(chain.startswith("kept[") for chain in forked.trace.rank_trace(0).table(Holders).chain)


@pytest.mark.slow
def test_a_variable_that_torch_reads_when_it_is_imported_is_set_before(tmp_path: Path) -> None:
    """The rank that sets it imports torch itself, also from another folder than the one it was started in."""
    _write(tmp_path, first='os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"; os.chdir("/")')
    ended = record(tmp_path, *_RANKS, "job.py")
    assert ended.stdout == "anew [] 1\n"
    assert ended.trace.ranks == (0, 1)


@pytest.mark.parametrize(
    ("last", "status", "message"),
    [
        ("sys.exit(dist.get_rank() * 3)", 3, "rank 1:\n"),
        ("raise ValueError('no ' + str(dist.get_rank())) if dist.get_rank() else sys.exit()", 1, "ValueError: no 1"),
        ("os.kill(os.getpid(), 9)", -9, "killed"),
    ],
)
def test_status_and_errors_of_a_forked_rank_are_its_own(tmp_path: Path, last: str, status: int, message: str) -> None:
    """An exit status, an exception or a signal of a rank end the dry run."""
    _write(tmp_path, last=last)
    ended = record(tmp_path, *_RANKS, "job.py")
    assert ended.returncode == status
    assert message in ended.stderr


_RECORD = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-o", "run.memprof", *_RANKS, "job.py")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_rank_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """A signal is passed on to it; where the parent is killed, the process that forks ends it."""
    _write(tmp_path, last='print("started", os.getpid(), flush=True); import time; time.sleep(100)')
    with subprocess.Popen(_RECORD, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as memprof:
        assert memprof.stdout is not None
        assert memprof.stdout.readline().startswith("forked")
        pid = int(memprof.stdout.readline().split()[1])
        memprof.send_signal(number)
        assert memprof.wait(60) == -number
    limit = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported_ends_the_dry_run(tmp_path: Path) -> None:
    """The process that forks receives it too, and leaves no traceback; no rank is started instead."""
    _write(tmp_path)
    with subprocess.Popen(_RECORD, cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0) as memprof:
        limit = time.monotonic() + 60
        while not any(_imports_torch(child) for child in psutil.Process(memprof.pid).children()):
            assert time.monotonic() < limit
            time.sleep(0.01)
        os.killpg(memprof.pid, signal.SIGINT)
        errors = memprof.communicate(timeout=60)[1]
        assert memprof.returncode == -signal.SIGINT
    assert "Traceback" not in errors
    assert "Fatal" not in errors


def _imports_torch(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("libtorch" in mapped.path for mapped in process.memory_maps())
    return False


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_end_with_a_message(tmp_path: Path) -> None:
    """Each receives before it sends: in a real run they would hang."""
    _write(tmp_path, last="dist.recv_object_list([None], src=1 - rank); dist.send_object_list([0], dst=1 - rank)")
    ended = record(tmp_path, *_RANKS, "job.py")
    assert ended.returncode == 125
    assert "waits for a message that rank" in ended.stderr
