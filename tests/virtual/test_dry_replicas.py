"""DistributedDataParallel on one rank: its buckets are allocated in a dry run as in a real one."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from memprof.virtual.ranks.replicas import Reducer
from tests.recorder.recorded import record

_JOB = """
import os, socket, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

with socket.socket() as free:
    free.bind(("localhost", 0))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1)
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(4)]
net = DistributedDataParallel(nn.Sequential(*layers).to("cuda" if cuda else "cpu"), bucket_cap_mb=0.5, OPTIONS)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(6):
    optimizer.zero_grad()
    with net.no_sync():
        net(torch.randn(32, 64, device="cuda" if cuda else "cpu")).square().mean().backward()
    net(torch.randn(32, 64, device="cuda" if cuda else "cpu")).square().mean().backward()
    optimizer.step()
"""
_OPTIONS = ("gradient_as_bucket_view=False", "gradient_as_bucket_view=True", "find_unused_parameters=True")


def _write(folder: Path, options: str) -> None:
    (folder / "job.py").write_text(_JOB.replace("OPTIONS", options))


@pytest.mark.parametrize("options", _OPTIONS)
def test_peak_is_that_of_a_real_run(options: str, tmp_path: Path) -> None:
    """Gradients and their buckets are counted, also where one is a view of the other."""
    _write(tmp_path, options)
    real = record(tmp_path, "job.py")
    dry = record(tmp_path, "--dry-run", "job.py", name="dry.memprof")
    assert dry.returncode == 0
    # Threads of gloo hold small tensors for as long as they take.
    assert abs(real.peak - dry.peak) <= 256, (real.peak, dry.peak)


def test_runs_on_a_card(tmp_path: Path) -> None:
    """Buckets lie on the card; gradients that are views of them take less."""
    peaks = []
    for options in _OPTIONS[:2]:
        _write(tmp_path, options)
        peaks.append(record(tmp_path, "--dry-run", "--device", "rtx4090", "job.py", name="card.memprof").peak)
    assert peaks[0] > peaks[1]


def test_the_first_buckets_are_freed_before_the_second_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch, which clears its buckets first: both at once would take the gradients' bytes twice."""
    parameters = [torch.zeros(8, requires_grad=True) for _ in range(3)]
    reducer = Reducer(pytest.fail, parameters, [[0], [1, 2]], [32, 32], None, [], 32, False, False, None, 32)
    reducer.prepare_for_backward([])
    torch.stack(parameters).sum().backward()
    first = [weakref.ref(bucket.buffer) for bucket in reducer._buckets]
    kept: list[bool] = []
    monkeypatch.setattr(reducer, "_allocate", lambda _: kept.extend(one() is not None for one in first))
    assert reducer._rebuild_buckets()
    assert kept == [False, False]
