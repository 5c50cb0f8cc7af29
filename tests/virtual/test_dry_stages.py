"""Pipelines of which some stages are dry-run, and DistributedDataParallel on one rank."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from memprof.analysis.ranks.rank_report import compare_ranks, job_notes
from memprof.trace.store import Trace
from memprof.virtual.ranks.replicas import Reducer
from tests.recorder.recorded import record

_STAGES = Path(__file__).parent / "rank_jobs" / "stages.py"


_ON_A_CARD = ("--dry-run", "--device", "rtx4090")


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_stages_that_are_not_run_have_the_peaks_that_they_have_if_they_are(tmp_path: Path, schedule: str) -> None:
    """Under torchrun all six are run. The one that is not has its peak on the line between two others, to the byte."""
    ranks = "6"
    some = _record_in_turn(tmp_path, "--ranks", ranks, str(_STAGES), schedule)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    every = record(tmp_path, *_ON_A_CARD, "--", *torchrun, str(_STAGES), schedule, name="every.memprof").trace
    assert some.ranks == (0, 1, 3, 4, 5)
    expected = {one.rank: one.peak_bytes for one in compare_ranks(every).ranks}
    found = {one.rank: one.peak_bytes for one in compare_ranks(some).ranks}
    held = some.manifest_of(1).between
    assert (held.ranks, held.other) == ((2,), 3)
    start, end = found[1], found[3]
    assert start is not None
    assert end is not None
    found[2] = round(start + held.shares[0] * (end - start))
    assert found == expected
    assert compare_ranks(some).worst == compare_ranks(every).worst
    assert "rank 2 is like ranks 1 and 3, except for the number of stored micro-batches" in job_notes(some)[0]


def _record_in_turn(folder: Path, *words: str) -> Trace:
    """Dry-runs one rank at a time: on several processors, one more may end before it is known to be like others."""
    path = folder / "some.memprof"
    command = [sys.executable, "-c", _ONE_PROCESSOR, "record", "-o", str(path), *_ON_A_CARD, *words]
    subprocess.run(command, cwd=folder, timeout=240, check=True)
    return Trace.open(path)


_ONE_PROCESSOR = """
import os, sys
os.sched_getaffinity = lambda _: {0}
from memprof.cli.main import main
sys.exit(main())
"""


_EXPORTED = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        mask = torch.ones(x.shape[1], 1, device=x.device, dtype=torch.bool)
        return self.head(self.words(x + places).masked_fill(mask.logical_not(), 0.0))
net = Net().cuda()
x = torch.randint(32, (4, 8), device="cuda")
if {exports}:
    net = torch.export.export(net, (x,)).module()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.allclose(x, x)
"""


def test_a_model_is_exported_on_a_virtual_gpu(tmp_path: Path) -> None:
    """The exported graph allocates what the model does; tools that split a model into stages export it."""
    peaks = []
    for exports in (False, True):
        (tmp_path / "job.py").write_text(_EXPORTED.format(exports=exports))
        peaks.append(record(tmp_path, *_ON_A_CARD, "job.py").peak)
    assert peaks[0] == peaks[1]


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
