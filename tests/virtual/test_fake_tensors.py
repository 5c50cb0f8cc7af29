"""Tensors without memory, on which torch works out shapes while a job trains: DTensor does before its operators."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memprof
from memprof.trace.store import Trace


def test_operators_on_fake_tensors_run_and_are_not_recorded(tmp_path: Path) -> None:
    """zeros_like and a factory under FakeTensorMode, in a recorded step: no error, no warning, no row, no bytes."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memprof.record(tmp_path / "run.memprof", skip=1, steps=2):
            for _ in range(4):
                loss = model(torch.ones(4, 8)).sum()
                with FakeTensorMode() as mode:
                    like = torch.zeros_like(mode.from_tensor(model.weight))
                    shapes.append((like.shape, torch.empty(1 << 30).shape))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert shapes == [(torch.Size([8, 8]), torch.Size([1 << 30]))] * 4
    trace = Trace.open(tmp_path / "run.memprof")
    assert not trace.manifest.notes
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        assert "aten.zeros_like.default" not in step.ops.name
        assert int(step.storages.requested_bytes.max()) < 1 << 20
