"""Recordings that pause between steps, and what must not start a step."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

import memprof
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Steps
from memprof.trace.store import Trace

ROWS, WIDTH = 64, 32


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(path: Path, evaluates_behind: int, evaluated: nn.Module, *, is_told: bool = True) -> Trace:
    """Records steps 1 to 4 of eight, with an evaluation of 40 batches after one of them."""
    gc.collect()
    model, optimizer = make()
    with memprof.record(path, skip=1, steps=4) as recorder:
        for number in range(8):
            train_step(model, optimizer)
            if number == evaluates_behind:
                if is_told:
                    torch.zeros(3)  # of the step that begins here, and left out with it
                    recorder.pause()
                with torch.no_grad():
                    for _ in range(40):
                        evaluated(torch.ones(4 * ROWS, WIDTH))
                recorder.resume()
    return Trace.open(path)


def test_what_runs_in_a_pause_is_in_no_step(tmp_path: Path) -> None:
    """Of four steps around a pause, those on the longer side are kept, each as without the pause."""
    evaluated = nn.Linear(WIDTH, 8 * WIDTH)
    trace = recorded(tmp_path / "paused.memprof", 3, evaluated)
    plain = recorded(tmp_path / "plain.memprof", 99, evaluated)
    assert plain.recorded_steps == (1, 2, 3, 4)
    assert trace.recorded_steps == (1, 2, 3)
    for number in trace.recorded_steps:
        trace.step(number).check()
    step, wanted = trace.steady_step(), plain.steady_step()
    assert list(step.ops.name) == list(wanted.ops.name)
    assert int(live_bytes(step).during.max()) == int(live_bytes(wanted).during.max())
    steps = trace.table(Steps)
    assert list(steps.step[steps.kind == "recorded"]) == [1, 2, 3, 4]
    assert int(steps.first_op_id[steps.step == 4][0]) == NONE  # heard, but on the other side
    assert trace.manifest.capture.is_complete


def test_steps_behind_a_pause_are_told_where_they_are_more(tmp_path: Path) -> None:
    """The stretch with more recorded steps is the one that is kept; what was alive before it is known in it."""
    trace = recorded(tmp_path / "paused.memprof", 1, nn.Linear(WIDTH, WIDTH))
    assert trace.recorded_steps == (2, 3, 4)
    step = trace.steady_step()
    older = step.storages.created_op_id == NONE
    assert (step.storages.category[older] == "parameter").sum() == 4 + 2  # of the model, and of the one evaluated


def test_pause_in_the_timed_step(tmp_path: Path) -> None:
    """A pause in the step that is timed lets it begin anew: operators are timed once."""
    trace = recorded(tmp_path / "paused.memprof", 4, nn.Linear(WIDTH, WIDTH))
    assert trace.recorded_steps == (1, 2, 3, 4)
    assert trace.manifest.op_times == "timed step 5"
    step = trace.steady_step()
    assert not np.isnan(step.ops.duration_us).any()


class Normed(nn.Module):
    """A part whose constructor calls modules, as parametrizations do and as those do that ask for a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.size = self.layer(torch.zeros(1, WIDTH)).shape[1]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Whole(nn.Module):
    """A model that is made around such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Normed()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(rows))


def test_model_that_is_being_made_begins_no_recording(tmp_path: Path) -> None:
    """A recorder that waits for a model waits until it is whole: its parts go by their names in it."""
    from memprof.recorder.recorder import Recorder
    from memprof.recorder.steps.window import Window

    gc.collect()
    recorder = Recorder(tmp_path / "run.memprof.spool" / "process-1", Window(skip=0, steps=1))
    recorder.install()
    try:
        model = Whole()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert not recorder.has_operators
        for _ in range(3):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            optimizer.step()
    finally:
        recorder.finish("the job ended")
    assert not recorder.failure
    (tmp_path / "run.memprof.spool" / "launch.json").write_text("{}")
    step = Trace.open(tmp_path / "run.memprof.spool").steady_step()
    roots = set(step.modules.type[step.modules.parent_id == NONE])  # and what others have left in this process
    assert "Whole" in roots
    assert not roots & {"Normed", "ParametrizedLinear", "ParametrizationList"}
    assert "part.layer" in set(step.modules.name)
