"""A dry run on a virtual GPU whose requests fail where it is full: ``--strict``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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
