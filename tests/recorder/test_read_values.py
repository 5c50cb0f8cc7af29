"""Values that a job reads are recorded, and replayed by its dry runs: both then run the same operators."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memprof.analysis.export.scrub import scrubbed
from memprof.launch.dry.dry_job import find_recorded_job, read_values_of
from memprof.launch.dry.job_server import DryRequest, JobServer
from memprof.launch.parent.settings import DryWindow
from memprof.recorder.calls import read_values
from memprof.recorder.calls.read_values import ReadLog
from memprof.trace.assemble.texts import read_value_table
from memprof.trace.files.spool import Spool
from memprof.trace.schema import ReadValues
from memprof.virtual.values.recorded import RecordedValues
from tests.recorder.conftest import Logged, RecordJob
from tests.recorder.recorded import Ended, record

SAMPLES = Path(__file__).parents[2] / "sample_traces"

_BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
"""
_END = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
#: An adaptive solver, as of a neural ODE: a placeholder ends it before its first step.
_SOLVER = """
def solve(y):
    t, width = torch.tensor(0.0), torch.tensor(0.5)
    while t < 1:
        slope = net(y)
        once = y + width * slope
        half = y + width / 2 * slope
        twice = half + width / 2 * net(half)
        error = (once - twice).abs().max()
        if error <= 0.01:
            t, y = t + width, twice
        width = torch.minimum(width * (0.7 if error > 0.01 else 1.1), 1.001 - t)
    return y
for _ in range(5):
    loss = solve(torch.randn(64, 32)).square().mean()
"""
#: Conjugate gradients until the residual is small, which a placeholder never is.
_CONJUGATE = """
def solve(matrix, right):
    found, residual = torch.zeros_like(right), right
    way, size = residual, residual.square().sum()
    for _ in range(60):
        product = matrix @ way
        rate = size / (way * product).sum()
        found, residual = found + rate * way, residual - rate * product
        now = residual.square().sum()
        if bool(now < 1e-6):
            break
        way, size = residual + now / size * way, now
    return found
for _ in range(5):
    root = net(torch.randn(16, 32))
    matrix = root @ root.T + torch.eye(16)
    loss = solve(matrix, torch.randn(16)).square().mean()
"""
#: Edges of points that are close to one another, of all pairs: all of them are edges where no value is known.
_GRAPH = """
edge = nn.Linear(64, 32)
for _ in range(5):
    points = net(torch.randn(300, 32))
    near = torch.cdist(points, points) < 0.9
    first, second = near.nonzero().unbind(1)
    messages = edge(torch.cat((points[first], points[second]), 1)).relu()
    kinds, place = torch.unique((10 * messages.detach().sum(1)).long(), return_inverse=True)
    sums = messages.new_zeros(len(kinds), 32).index_add(0, place, messages)
    loss = sums.square().mean() + messages[messages[:, 0] > 0.1].mean()
"""
#: Numbers of experts' tokens as a list, by which their outputs are split.
_SPLIT = """
for _ in range(5):
    y = net(torch.randn(256, 32))
    choice = y.argmax(1) % 4
    sizes = torch.bincount(choice, minlength=4).tolist()
    parts = torch.split(y, sizes)
    loss = sum(net(part).square().sum() for part in parts[:1]) / 256
"""
#: Overflows in the first iterations, and after each update, which update nothing: the largest float32 is below 2**128.
_SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
for _ in range(16):
    loss = net(torch.randn(64, 32)).square().sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_SEARCHED = """
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=6, line_search_fn="strong_wolfe")
for _ in range(5):
    x = torch.randn(64, 32)
    def closure():
        optimizer.zero_grad()
        loss = (net(x) - x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
JOBS = {
    "solver": _BEGIN + _SOLVER + _END,
    "conjugate gradients": _BEGIN + _CONJUGATE + _END,
    "graph": _BEGIN + _GRAPH + _END,
    "split": _BEGIN + _SPLIT + _END,
    "scaler": _BEGIN + _SCALED,
    "line search": _BEGIN + _SEARCHED,
}
_WINDOW = ("--skip", "2", "--steps", "2")


def replayed(folder: Path, script: str, *plan: str) -> tuple[Ended, Ended, Ended]:
    """Records a script, and its dry runs with placeholders and with its values; the first and last under a plan."""
    (folder / "job.py").write_text(script)
    values = record(folder, *_WINDOW, "job.py", name="values.memprof")
    real = record(folder, *_WINDOW, *plan, "job.py", name="real.memprof") if plan else values
    without = record(folder, *_WINDOW, "--dry-run", *plan, "job.py", name="without.memprof")
    dry = record(folder, *_WINDOW, "--dry-run", "--values-from", "values.memprof", *plan, "job.py", name="dry.memprof")
    return real, without, dry


@pytest.mark.parametrize("job", JOBS)
def test_a_dry_run_with_a_jobs_values_runs_its_operators(job: str, tmp_path: Path) -> None:
    """The peaks of all recorded steps are the real ones to the byte, and so are the operators; placeholders differ."""
    real, without, dry = replayed(tmp_path, JOBS[job])
    assert [note for note in dry.trace.manifest.notes if "values that a recording of the job has" in note]
    assert dry.trace.step_peaks() == real.trace.step_peaks()
    assert operators(dry) == operators(real)
    if without.returncode:  # placeholders never end its loop
        assert "--values-from" in without.stderr
    else:
        assert operators(without) != operators(real) or without.trace.step_peaks() != real.trace.step_peaks()


def operators(ended: Ended) -> list[list[str]]:
    """Returns the operators of each recorded step."""
    return [ended.trace.step(number).ops.name.tolist() for number in ended.trace.recorded_steps]


#: A mask that is computed and true for every other row, of which each part of a batch has its share.
_MASKED = (
    _BEGIN
    + """
class Masked(nn.Module):
    def __init__(self, each):
        super().__init__()
        self.each, self.inner = each, nn.Linear(32, 32)
    def forward(self, x):
        rows = torch.arange(len(x)) + 0.0 * x.detach()[:, 0]
        chosen = (rows % self.each < 0.5).nonzero().squeeze(1)
        return x.index_add(0, chosen, self.inner(x[chosen]).relu())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Masked(each) for each in (2, 4, 8)))
    def forward(self, x):
        return self.layers(x)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(640, 32)), 128):
    loss = net(x).square().mean()
"""
    + _END
)


@pytest.mark.parametrize(
    "plan", [("--accumulate", "2"), ("--checkpoint", "layers.*")], ids=["accumulate", "checkpoint"]
)
def test_values_fit_a_plan_that_changes_their_order(plan: tuple[str, str], tmp_path: Path) -> None:
    """Parts of a batch have their share of rows, and a region that runs again has those that it had first."""
    real, without, dry = replayed(tmp_path, _MASKED, *plan)
    assert dry.trace.step_peaks() == real.trace.step_peaks()
    assert min(without.trace.step_peaks().values()) > max(real.trace.step_peaks().values())


def test_a_loop_that_placeholders_do_not_end_is_refused(tmp_path: Path) -> None:
    """The dry run ends with status 125 and the line of the loop; with the job's values it ends as the job does."""
    loop = """
for _ in range(5):
    y = net(torch.randn(4, 32))
    while not (y.detach().norm() < 1).all().logical_not().logical_not().item() == bool(y.detach().norm() < 1) + 2:
        y = 0.9 * y
        if y.detach().norm().item() < 0.5:
            break
    loss = y.square().mean()
"""
    script = _BEGIN + loop + _END
    real, without, dry = replayed(tmp_path, script)
    assert without.returncode == 125
    line = 1 + script.splitlines().index("        if y.detach().norm().item() < 0.5:")
    assert f"the loop at job.py:{line} cannot be dry-run" in without.stderr
    assert dry.trace.step_peaks() == real.trace.step_peaks()


def test_recordings_without_values_are_refused(tmp_path: Path) -> None:
    """One of an older version, or of a dry run, has none: the message says so, and nothing runs."""
    older = next(SAMPLES.glob("*/run.memprof"))
    assert read_values_of(older) == ""
    assert read_values_of(tmp_path / "missing.memprof") == ""
    (tmp_path / "job.py").write_text(JOBS["solver"])
    ended = record(tmp_path, "--dry-run", "--values-from", str(older), "job.py")
    assert ended.returncode == 125
    assert "has no values to replay" in ended.stderr
    ended = record(tmp_path, "--values-from", str(older), "job.py")
    assert "--values-from is for dry runs" in ended.stderr


def reading() -> list[object]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    read: list[object] = []
    for _ in range(3):
        y = net(torch.randn(6, 4))
        read += [y.sum().item(), y[0].tolist(), bool((y > 0).any()), y.detach()[1].numpy().tolist()]
        read += [(y > 0).nonzero().shape[0], torch.equal(y, y), torch.rand(1).item()]
        y.sum().backward()
        optimizer.step()
    return read


def test_values_are_those_that_the_job_read(record_job: RecordJob) -> None:
    """In order, with step, line and operator; the job's results and random numbers are those of an unrecorded one."""
    trace = record_job(reading, steps=1, skip=1)
    values = trace.table(ReadValues)
    second = values.take(values.step == 1)
    expected = reading()[7:14]
    kept = [json.loads(value) for value in second.value]
    assert kept == pytest.approx(expected) if not isinstance(expected[1], list) else kept == expected
    assert second.name.tolist() == [
        "aten._local_scalar_dense.default",
        "Tensor.tolist",
        "aten._local_scalar_dense.default",
        "Tensor.numpy",
        "aten.nonzero.default",
        "aten.equal.default",
        "aten._local_scalar_dense.default",
    ]
    assert second.elements.tolist() == [1, 4, 1, 4, 24, 1, 1]
    assert all(line.startswith("test_read_values.py:") and line.endswith(":reading") for line in second.line)
    assert not hasattr(torch.Tensor.tolist, "is_memprof")
    assert len(scrubbed(trace).table(ReadValues)) == 0


def test_a_step_of_which_some_values_were_not_kept_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two values of 16 characters, the third of step 1 ends the log: only step 0 is replayed."""
    monkeypatch.setattr(read_values, "_MOST_CHARACTERS", 3 * 16)
    log = Logged()
    reads = ReadLog(log)
    name = log.intern("names", "aten._local_scalar_dense.default")
    item = torch.ops.aten._local_scalar_dense.default
    for step in (0, 1, 2):
        reads.begin_step(step, is_recorded=True)
        for value in (0.5, 1.5):
            reads.add(item, name, -1, (), value, sys._getframe())
    reads.close()
    assert reads.notes() == ["the job reads many values: its dry runs replay those of the first recorded steps"]
    rows = np.array([list(row.values()) for row in log.rows("reads")], np.int64)
    records = {stream: [log.texts(stream)] for stream in ("names", "read_lines", "read_values")}
    table = read_value_table(Spool({"reads": rows}, {**records, "reads_end": log.written.records["reads_end"]}))
    assert (table.step.tolist(), table.value.tolist()) == ([0, 0], ["0.5", "1.5"])


def test_values_start_over_and_share_with_parts() -> None:
    """A line's values are replayed in order and start over; a half of the elements has half of the rows, rounded up."""
    aten = torch.ops.aten
    item, nonzero, unique = aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default

    def value() -> Any:
        return recorded.value(item, sys._getframe())

    def rows(func: Any, elements: int) -> int | None:
        return recorded.rows(func, torch.empty(elements), sys._getframe())

    at = {
        function: f"test_read_values.py:{function.__code__.co_firstlineno + 1}:{function.__name__}"
        for function in (value, rows)
    }
    recorded = RecordedValues(
        [
            *((3, at[value], str(item), "aten.lt.Scalar", 1, text) for text in ("false", "true")),
            *((3, at[rows], str(func), "", 100, "31") for func in (nonzero, unique)),
        ]
    )
    assert value() is None  # before the first step
    recorded.begin_step(5, is_recorded=True)  # it was not recorded: those of the last one before it
    assert [value() for _ in range(3)] == [False, True, False]
    assert [rows(nonzero, elements) for elements in (100, 50, 200)] == [31, 16, 62]
    assert [rows(unique, elements) for elements in (100, 50, 20)] == [31, 31, 20]
    recorded.close()
    assert value() is None


def test_a_real_tensors_checks_are_left_out() -> None:
    """`one_hot` reads the least class of a real tensor as well; in a dry run it reads the largest alone."""
    item = torch.ops.aten._local_scalar_dense.default

    def value() -> Any:
        return recorded.value(item, sys._getframe())

    at = f"test_read_values.py:{value.__code__.co_firstlineno + 1}:value"
    reads = (("aten.aminmax.default", "0"), (str(item), "9"), ("aten.sum.default", "7"))
    recorded = RecordedValues([(0, at, str(item), previous, 1, text) for previous, text in reads])
    recorded.begin_step(0, is_recorded=True)
    recorded.previous = "aten.max.default"
    assert value() == 9
    recorded.previous = "aten.sum.default"
    assert value() == 7


def test_checks_of_plans_replay_values_and_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of `suggest` and `fit` peaks as recorded, or has placeholders where it fails with the values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOBS["split"])
    trace = record(tmp_path, *_WINDOW, "job.py").trace
    values = read_values_of(trace.path)
    wrong = [[*row[:5], "[1, 1, 1, 1]"] if row[2] == "Tensor.tolist" else row for row in json.loads(values)]
    peaks = []
    for replayed_values in (values, json.dumps(wrong), ""):
        with JobServer(find_recorded_job(trace.manifest), DryWindow(2, 2), read_values=replayed_values) as server:
            (outcome,) = server.run([DryRequest(None)])
        assert outcome.reason == ""
        peaks.append(outcome.peak_bytes)
    assert peaks[0] == max(trace.step_peaks().values())
    assert peaks[1] == peaks[2]
