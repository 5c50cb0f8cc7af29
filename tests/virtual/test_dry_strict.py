"""A dry run on a virtual GPU whose requests fail where it is full: ``--strict``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.machines.card import find_card
from tests.recorder.recorded import record_script

_JOB = """
import json, sys
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def train(batch):
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    said.append([batch, left])
    model = Stack().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(batch, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

said = []
"""
_ACCELERATE = """
from accelerate.utils import find_executable_batch_size
import atexit
atexit.register(lambda: print("SAID", json.dumps(said)))
find_executable_batch_size(train, starting_batch_size=1 << 19)()
"""
_BY_HAND = """
batch = 1 << 19
while True:
    try:
        train(batch)
    except torch.cuda.OutOfMemoryError as error:
        assert isinstance(error, RuntimeError) and type(error) is torch.OutOfMemoryError
        print("ERROR", error)
    batch //= 2
"""


def test_a_job_that_shrinks_its_batch_ends_at_one_that_fits(tmp_path: Path) -> None:
    """accelerate recognizes the error, what the failed batches held is freed, and the batch that fits is recorded."""
    pytest.importorskip("accelerate")
    ended = record_script(tmp_path, _JOB + _ACCELERATE, "--dry-run", "--device", "rtx4090", "--strict")
    assert ended.returncode == 0, ended.stderr
    said = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("SAID"))[5:])
    batches = [batch for batch, _ in said]
    assert batches[0] == 1 << 19
    assert len(batches) > 2
    assert batches == sorted(batches, reverse=True)
    assert max(left for _, left in said) <= 2 * 8_519_680  # cuBLAS keeps its workspaces
    assert "memory ran out" in ended.stderr
    assert "Fits on RTX 4090" in ended.stderr


def test_the_error_is_torchs(tmp_path: Path) -> None:
    """Its type and its text are those of torch's allocator, with the sizes of the device."""
    ended = record_script(tmp_path, _JOB + _BY_HAND, "--dry-run", "--device", "rtx4090", "--strict")
    assert ended.returncode == 0, ended.stderr
    error = next(line for line in ended.stdout.splitlines() if line.startswith("ERROR"))[6:]
    assert re.match(
        r"CUDA out of memory\. Tried to allocate 8\.00 GiB\. GPU 0 has a total capacity of 23\.61 GiB of which "
        r"[\d.]+ GiB is free\. Including non-PyTorch memory, this process has [\d.]+ GiB memory in use\. Of the "
        r"allocated memory [\d.]+ GiB is allocated by PyTorch, and [\d.]+ MiB is reserved by PyTorch but unallocated\.",
        error,
    ), error


def test_an_error_that_nobody_catches_ends_the_job(tmp_path: Path) -> None:
    """The status is the job's own, and the line says where memory ran out."""
    ended = record_script(tmp_path, _JOB + "train(1 << 19)\n", "--dry-run", "--device", "rtx4090", "--strict")
    assert ended.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB" in ended.stderr
    assert "memprof: out of memory" in ended.stderr


def test_strict_needs_a_device(tmp_path: Path) -> None:
    """Without a simulated device there is no capacity."""
    ended = record_script(tmp_path, "", "--dry-run", "--strict")
    assert ended.returncode == 125
    assert "--device rtx4090" in ended.stderr


_OBSERVED = """
def observe(device, alloc, device_alloc, device_free):
    print("SAID", json.dumps([alloc, device_alloc, device_free]))
    torch.cuda.memory._dump_snapshot("oom.pickle")

torch.cuda.memory._record_memory_history()
torch._C._cuda_attach_out_of_memory_observer(observe)
model = Stack().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in (1 << 15, 1 << 16, 1 << 17, 1 << 18):  # the last runs out, behind the steps that are recorded
    model(torch.randn(batch, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_snapshot_that_an_observer_writes_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job ends with its error, and the snapshot holds what was free and what was asked for, as in torch."""
    ended = record_script(tmp_path, _JOB + _OBSERVED, "--dry-run", "--device", "rtx4090", "--strict")
    assert ended.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in ended.stderr
    assert "Fits on" not in ended.stderr
    said = next(line for line in ended.stdout.splitlines() if line.startswith("SAID"))
    requested, total, free = json.loads(said[5:])
    assert requested > free
    assert main(["import", str(tmp_path / "oom.pickle"), "-o", str(tmp_path / "oom.memprof")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "oom.memprof"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["out_of_memory"]
    room = found["room"]
    assert (room["requested_bytes"], room["free_bytes"]) == (requested, free)
    # Everything torch has, what is free, and the context are the device.
    inside = room["used_bytes"] + room["scattered_bytes"] + room["idle_bytes"]
    assert inside == found["reserved_bytes"] == total - free - find_card("rtx4090").context_bytes
    assert found["step"] == 3
    assert sum(found["held"]["by_category"].values()) == found["allocated_bytes"]
    # What each recording says of its steps is not that the job fits.
    for name, begins in (("oom", "The recorded part of the step fits: "), ("run", "The recorded steps fit: ")):
        assert main(["suggest", str(tmp_path / f"{name}.memprof"), "--budget", "80GiB"]) == 0
        assert capsys.readouterr().out.startswith(begins)
