"""The snapshots that a job takes of the virtual GPU in a dry run, and which allocations they hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import memprof
from memprof.analysis.compared.allocation_sequence import read_sequence
from memprof.trace.importers.snapshot import read_snapshot
from memprof.virtual.device.job_history import JobHistory
from tests.recorder.recorded import record_script

_JOB = """
import pickle, sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory = torch.cuda.memory
for step in range(40):
    if step == {start}:
        memory._record_memory_history({options})
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
    if step == {stop}:
        {take}
        memory._record_memory_history(None)
"""
_DUMP = "memory._dump_snapshot('job.pickle')"


def job(take: str = _DUMP, options: str = "", start: int = 1, stop: int = 8) -> str:
    """Returns a script that records its own history of some steps."""
    return _JOB.format(take=take, options=options, start=start, stop=stop)


def entries(path: Path) -> list[dict[str, Any]]:
    """Returns the history in a snapshot."""
    trace: list[dict[str, Any]] = pickle.loads(path.read_bytes())["device_traces"][0]
    return trace


def test_the_jobs_own_snapshot_is_written_as_on_a_gpu(tmp_path: Path) -> None:
    """It holds history, stacks, segments and blocks; the job goes on until it has taken it, and ends there."""
    ended = record_script(tmp_path, job(), "--dry-run", "--device", "rtx4090")
    assert "step 8" in ended.stdout
    assert "step 9" not in ended.stdout
    assert ended.trace.manifest is not None
    (device,) = read_snapshot(tmp_path / "job.pickle").devices
    assert device.facts.has_timeline
    assert device.lives.clashes == 0
    assert device.facts.end_reserved_bytes == device.facts.peak_reserved_bytes > 0
    sequence = read_sequence(str(tmp_path / "job.pickle"))
    assert sequence.start_bytes > 64 * 256 * 4 * 2
    assert sequence.peak_bytes > sequence.start_bytes
    assert {"addmm", "mm"} <= set(sequence.operators)
    assert sequence.is_backward.any()
    assert any(place.startswith("job.py:") or place.endswith(".py:12") for place in sequence.places), sequence.places


def test_an_existing_snapshot_of_a_gpu_is_kept(tmp_path: Path) -> None:
    """What no dry run wrote is not overwritten; what one wrote is."""
    (tmp_path / "job.pickle").write_bytes(b"from a GPU")
    assert record_script(tmp_path, job(), "--dry-run", "--device", "rtx4090").returncode == 0
    assert (tmp_path / "job.pickle").read_bytes() == b"from a GPU"
    first = entries(tmp_path / "job.dry-run.pickle")
    (tmp_path / "job.pickle").unlink()
    assert record_script(tmp_path, job(), "--dry-run", "--device", "rtx4090").returncode == 0
    assert record_script(tmp_path, job(), "--dry-run", "--device", "rtx4090").returncode == 0
    assert [one["size"] for one in entries(tmp_path / "job.pickle")] == [one["size"] for one in first]


def test_a_snapshot_in_the_jobs_own_hands(tmp_path: Path) -> None:
    """`_snapshot` answers with the dictionary that the job writes itself; the job ends before its next backward."""
    take = "pickle.dump(memory._snapshot(), open('job.pickle', 'wb'))"
    ended = record_script(tmp_path, job(take), "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "step 9" not in ended.stdout
    assert {one["action"] for one in entries(tmp_path / "job.pickle")} >= {"alloc", "free_requested", "free_completed"}


def test_a_history_is_kept_as_the_job_asks(tmp_path: Path) -> None:
    """The last entries of a short one; without some actions; with stacks of Python alone, or none."""
    take = _DUMP
    record_script(tmp_path, job(take, "max_entries=7"), "--dry-run", "--device", "rtx4090")
    assert len(entries(tmp_path / "job.pickle")) == 7
    record_script(tmp_path, job(take, "stacks='python', context='alloc'"), "--dry-run", "--device", "rtx4090")
    found = entries(tmp_path / "job.pickle")
    frames = [frame for one in found for frame in one["frames"]]
    assert frames
    assert all(frame["filename"].endswith(".py") or frame["filename"].startswith("<") for frame in frames)
    assert all(not one["frames"] for one in found if one["action"].startswith("free"))
    own = str(Path(memprof.__file__).parent)  # the checkout itself may be called memprof
    assert not any(frame["filename"].startswith(own) for frame in frames)


def test_a_history_of_pinned_memory_alone_leaves_out_the_card() -> None:
    """torch 2.15 passes two more arguments: whether pinned memory is recorded, and whether the card's is."""
    history = JobHistory()
    for is_on in (True, False):
        history.configure("all", "all", "all", 7, False, False, False, [], True, is_on)
        assert history.is_on is is_on


def test_what_the_job_notes_is_in_its_history() -> None:
    """`torch.cuda.memory._set_memory_metadata` marks the entries that follow, until it is called again."""
    history = JobHistory()
    history.configure("all", None)
    history.metadata = '{"phase":"rollout"}'
    history.took(4096, 512)
    history.metadata = ""
    history.gave(4096, 512)
    (trace,) = history.fill({"segments": []})["device_traces"]
    assert [one["user_metadata"] for one in trace] == ['{"phase":"rollout"}', "", ""]


def test_sums_of_gradients_are_in_place_where_nobody_holds_them(tmp_path: Path) -> None:
    """As on a GPU: the second use of a tensor adds into the gradient of the first, unless a hook has kept that."""
    script = """
import torch
memory = torch.cuda.memory
x = torch.randn(256, 256, device="cuda", requires_grad=True)
kept = []
def train(is_kept):
    hidden = x * 2
    if is_kept:
        hidden.register_hook(lambda gradient: kept.append(gradient))
    left, right, third = hidden.sin(), hidden.cos(), hidden.exp()
    if is_kept:
        left.register_hook(lambda gradient: None)
    loss = left.sum() + right.sum() + third.sum()
    del left, right, third, hidden
    loss.backward()
train(False)
x.grad = None
memory._record_memory_history()
train(False)
memory._dump_snapshot("job.pickle")
"""
    record_script(tmp_path, script, "--dry-run", "--device", "rtx4090")
    sequence = read_sequence(str(tmp_path / "job.pickle"))
    backward = [name for name, is_in in zip(sequence.operators, sequence.is_backward, strict=True) if is_in]
    assert backward.count("mul_Tensor") >= 4
    assert "add_Tensor" not in backward


def test_inference_mode_runs_as_its_operators_do(tmp_path: Path) -> None:
    """Composite operators are followed into their parts, and autocast keeps no casts, as since torch 2.11."""
    script = """
import torch
from torch import nn
memory = torch.cuda.memory
model = nn.Linear(64, 32).cuda()
x = torch.randn(2, 3, 64, device="cuda")
with torch.inference_mode():
    model(x)
memory._record_memory_history()
before = torch.cuda.memory_allocated()
with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
    model(x)
    assert torch.cuda.memory_allocated() == before, "a cast is kept"
    torch.einsum("bij,kj->bik", x, model.weight)
    torch.where(x > 0, x, 0.0)
memory._dump_snapshot("job.pickle")
"""
    ended = record_script(tmp_path, script, "--dry-run", "--device", "rtx4090")
    assert "a cast is kept" not in ended.stderr, ended.stderr
    names = read_sequence(str(tmp_path / "job.pickle")).operators
    assert "addmm" in names
    assert "bmm" in names
    assert not {"linear", "einsum"} & set(names)


def test_a_bias_that_is_not_fused_is_added_in_place(tmp_path: Path) -> None:
    """Attention's projection of a transposed batch takes its result alone; a sum that the job writes takes its own."""
    script = """
import torch
from torch import nn
memory = torch.cuda.memory
attend = nn.MultiheadAttention(48, 4, batch_first=True).cuda()
x = torch.randn(3, 5, 48, device="cuda")
weight, bias = attend.in_proj_weight, attend.in_proj_bias
attend(x, x, x)
memory._record_memory_history()
{statement}
memory._dump_snapshot("job.pickle")
"""
    size = 3 * 48 * 15 * 4 // 512 * 512 + 512
    counts = {}
    for name, statement in (("fused", "attend(x, x, x)"), ("written", "x.transpose(0, 1) @ weight.t() + bias")):
        (tmp_path / name).mkdir()
        record_script(tmp_path / name, script.format(statement=statement), "--dry-run", "--device", "rtx4090")
        counts[name] = read_sequence(str(tmp_path / name / "job.pickle")).sizes.tolist().count(size)
    # The projection, and its parts for queries, keys and values laid out one after the other.
    assert counts == {"fused": 2, "written": 2}
