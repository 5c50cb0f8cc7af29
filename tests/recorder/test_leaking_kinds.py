"""Growth of other kinds: in other threads, in a tensor that is replaced, and in a loop without steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from tests.recorder.recorded import record, record_script


def leaks_of(folder: Path, job: Path) -> LeakReport:
    """Records a job in a process of its own and returns what grows in it."""
    return find_leaks(record(folder, "-q", str(job)).trace)


POOLED = """\
import concurrent.futures
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
pool, pending = concurrent.futures.ThreadPoolExecutor(1), []
for step in range(8):
    out = model(torch.randn(128, 64))
    pending.append(pool.submit(torch.ones, 128, 64))
    pool.submit(int).result()  # the worker has released the work before
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
"""


def test_what_another_thread_made_has_no_line_of_this_thread(tmp_path: Path) -> None:
    """The results of a pool's futures are not attributed to the operator during which they appeared."""
    script = tmp_path / "train.py"
    script.write_text(POOLED)
    report = leaks_of(tmp_path, script)
    (leak,) = report.leaks
    assert (leak.bytes_per_step, leak.line, leak.op, leak.shape) == (128 * 64 * 4, "", "", "128x64")
    assert leak.held_by is not None
    assert re.fullmatch(r"pending\[\d\]\._result", leak.held_by.chain)


def test_what_another_thread_makes_at_the_end_of_a_step_is_listed(tmp_path: Path) -> None:
    """It appears in the next step, so the last recorded step shows that of the step before."""
    script = tmp_path / "train.py"
    submit, wait = (line for line in POOLED.splitlines() if "pool.submit" in line)
    others = [line for line in POOLED.splitlines() if line not in (submit, wait)]
    # From the first recorded step on, which therefore shows none.
    script.write_text("\n".join([*others, "    if step > 1:", f"    {submit}", f"    {wait}", ""]))
    report = leaks_of(tmp_path, script)
    (leak,) = report.leaks
    assert report.growth.bytes_per_step == 128 * 64 * 4
    assert (leak.bytes_per_step, leak.since_step, leak.line, leak.shape) == (128 * 64 * 4, 2, "", "128x64")


def test_a_loop_without_an_optimizer_is_said_to_be_one_step(tmp_path: Path) -> None:
    """What an inference keeps does not grow from step to step: the page says where to look instead."""
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\nkept = [model(torch.ones(4, 8)) for _ in range(9)]\n"
    )
    report = leaks_of(tmp_path, script)
    assert report.growth.bytes_per_step is None
    assert "In a loop without one, `memprof record --light` counts each call of the model" in report.growth.why_unknown


JOINED = """\
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
history = torch.zeros(128, 64)
for step in range(8):
    out = model(torch.randn(128, 64))
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
    history = torch.cat((history, out.detach()))
"""


def test_a_history_that_is_joined_anew_in_every_step_is_found_by_its_line(tmp_path: Path) -> None:
    """No tensor is older than a step, but each is larger than the one that it replaces."""
    script = tmp_path / "train.py"
    script.write_text(JOINED)
    report = leaks_of(tmp_path, script)
    (leak,) = report.leaks
    assert (leak.bytes_per_step, leak.op) == (128 * 64 * 4, "aten.cat.default")
    assert leak.line.endswith("train.py:10")


RING = """\
import collections
import types
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
agent = types.SimpleNamespace(memory=collections.deque(maxlen=100))
for step in range(8):
    out = model(torch.randn(128, 64))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    agent.memory.append(out.detach())
"""


@pytest.mark.parametrize(("bound", "growth"), [("maxlen=100", None), ("", 128 * 64 * 4)])
def test_a_ring_that_fills_up_is_undecided(bound: str, growth: int | None, tmp_path: Path) -> None:
    """A replay buffer with a bound grows until it is full; without one, each step adds 128*64*4 bytes for ever."""
    script = tmp_path / "train.py"
    script.write_text(RING.replace("maxlen=100", bound))
    report = leaks_of(tmp_path, script)
    assert report.growth.bytes_per_step == growth
    (leak,) = report.leaks
    assert leak.held_by is not None
    assert leak.held_by.chain.startswith("agent.memory[")
    assert (leak.held_by.kind == "ring") == (growth is None)


ONCE_AN_EPOCH = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
results = []
for step in range(40):
    x = torch.randn(32, 16)
    (net(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        with torch.no_grad():
            results.append(torch.cat([net(x) for _ in range(8)]))
"""


def test_what_is_kept_once_an_epoch_points_to_the_whole_run(tmp_path: Path) -> None:
    """No step of the window keeps anything: counts of tensors after it name the list, and `--light` the rest."""
    report = find_leaks(record_script(tmp_path, ONCE_AN_EPOCH, "-q").trace)
    assert (report.growth.bytes_per_step, report.growth.how) == (None, "storages")
    assert "held by `results[" in report.growth.why_unknown
    assert "job.py:7" in report.growth.why_unknown
    assert "`memprof record --light " in report.growth.why_unknown


def test_a_whole_run_names_the_line_of_what_is_kept_once_an_epoch(tmp_path: Path) -> None:
    """16 KiB every 5 steps, in one number: that of the run and that of the line."""
    report = find_leaks(record_script(tmp_path, ONCE_AN_EPOCH, "-q", "--light").trace)
    (leak,) = report.leaks
    assert report.growth.bytes_per_step == leak.bytes_per_step
    assert abs(leak.bytes_per_step - 16384 / 5) < 2
    assert (leak.every_steps, leak.line.endswith("job.py:15"), leak.op) == (5, True, "aten.cat.default")
    assert leak.held_by is not None
    assert leak.held_by.chain.startswith("results[")
    assert leak.held_by.place.endswith("job.py:7")


BY_HAND = """
import torch

net = torch.nn.Linear(64, 64)
seen = {}
for step in range(9):
    x = torch.randn(32, 64)
    net.zero_grad()
    net(x).square().mean().backward()
    seen[step] = x
    for weights in net.parameters():
        weights.data.add_(-0.1 * weights.grad)
"""


def test_what_a_loop_without_an_optimizer_keeps_has_a_holder(tmp_path: Path) -> None:
    """Its window is followed by no timed step: what stays is looked up all the same."""
    report = find_leaks(record_script(tmp_path, BY_HAND, "-q").trace)
    (leak,) = report.leaks
    assert leak.bytes_per_step == 8192
    assert leak.held_by is not None
    assert leak.held_by.chain.startswith("seen[")
