"""Snapshots of the virtual GPU: torch's form, those that a job takes, and categories of imported ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import memprof
from memprof.analysis.allocator.imported_parts import imported_block_sizes
from memprof.analysis.compared.allocation_sequence import read_sequence
from memprof.analysis.report.report import build_report
from memprof.replay.allocator.events import ALLOCATE
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.replay.allocator.rules import Settings
from memprof.trace.importers.importing import import_file
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.schema import NONE, Ops
from memprof.trace.store import Trace, write_trace
from memprof.virtual.device.job_history import JobHistory
from memprof.virtual.device.statistics import memory_snapshot
from tests.analysis.plain_snapshot import exported
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


MIB = 1 << 20


def test_an_expandable_segment_with_a_hole_is_reported_in_parts() -> None:
    """As by torch, which reports one segment for each contiguous range of mapped memory."""
    allocator = CachingAllocator(Settings(expandable_segments=True, capacity_bytes=100 * MIB))
    first, middle, _last = (allocator.allocate(20 * MIB) for _ in range(3))
    assert first is not None
    assert middle is not None
    (whole,) = memory_snapshot(allocator)["segments"]
    assert whole["total_size"] == 60 * MIB
    allocator.request_free(middle)
    allocator.complete_free(middle)
    assert allocator.allocate(60 * MIB) is not None  # with the middle's pages, which are unmapped for it
    parts = memory_snapshot(allocator)["segments"]
    assert [(one["address"] - first.address, one["total_size"]) for one in parts] == [
        (0, 20 * MIB),
        (40 * MIB, 80 * MIB),
    ]
    for one in parts:
        assert sum(block["size"] for block in one["blocks"]) == one["total_size"]
    assert allocator.allocate(40 * MIB) is None
    assert (allocator.log[-1].action, allocator.log[-1].address) == ("oom", 0)  # nothing is left of the device


def test_a_failed_request_logs_what_is_free() -> None:
    """Where torch's history has the bytes of the device that are free."""
    allocator = CachingAllocator(Settings(capacity_bytes=100 * MIB))
    assert allocator.allocate(60 * MIB) is not None
    assert allocator.allocate(60 * MIB) is None
    assert allocator.log[-1].address == allocator.free_on_device == 40 * MIB


JOB = """
import sys, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
model = nn.Sequential(nn.Embedding(3000, 256), *(Block(256) for _ in range(4)), nn.Linear(256, 3000)).to("cuda")
if sys.argv[1] == "frozen":
    for part in model[:3]:
        part.requires_grad_(False)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, fused=sys.argv[1] == "accumulated")
data = torch.randint(0, 3000, (20_000 if sys.argv[1] == "data" else 8, 128), device="cuda")
for step in range(5):
    for _ in range(3 if sys.argv[1] == "accumulated" else 1):
        x, y = data[:8], torch.randint(0, 3000, (8, 128), device="cuda")
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def as_torch_would(trace: Trace) -> bytes:
    """Exports a recording as torch would: no Python frames in backward, no entries of older memory, no categories."""
    content, ops = pickle.loads(exported(trace)), trace.table(Ops)
    issued = requests_of_trace(trace)
    made_by = issued.made_by[issued.requests.allocation[issued.requests.kind == ALLOCATE]].tolist()
    history = content["device_traces"][0]
    for entry in history:
        entry["user_metadata"] = ""
    places = [place for place, entry in enumerate(history) if entry["action"] == "alloc"]
    for place, op in zip(places, made_by, strict=True):
        if op != NONE and ops.phase[op] == "backward":
            history[place]["frames"] = []
    content["device_traces"][0] = history[places[made_by.count(NONE)] :]
    return pickle.dumps(content, protocol=4)


def at_peak(trace: Trace) -> dict[str, int]:
    """Returns the bytes at the peak by category."""
    return {str(part.key): part.bytes for part in build_report(trace).at_peak.by_category.parts}


@pytest.mark.parametrize("kind", ["adamw", "frozen", "accumulated", "data"])
def test_bytes_at_the_peak_have_the_right_category(kind: str, tmp_path: Path) -> None:
    """95 % of the bytes at the peak are in the category that the recording knows, and less than 5 % are unknown."""
    trace = record_script(tmp_path, JOB, "-q", "--dry-run", "--device", "rtx4090", words=(kind,)).trace
    (tmp_path / "s.pickle").write_bytes(as_torch_would(trace))
    imported = import_file(tmp_path / "s.pickle", block_sizes=imported_block_sizes)
    write_trace(tmp_path / "imported.memprof", imported.ranks)
    truth, found = at_peak(trace), at_peak(Trace.open(tmp_path / "imported.memprof"))
    total = sum(truth.values())
    assert sum(min(size, found.get(name, 0)) for name, size in truth.items()) >= 0.95 * total
    assert found.get("unknown", 0) < 0.05 * total
