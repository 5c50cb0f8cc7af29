"""Categories of imported snapshots against the truth: dry runs, exported as snapshots and imported again."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from memprof.analysis.allocator.imported_parts import imported_block_sizes
from memprof.analysis.report.report import build_report
from memprof.replay.allocator.events import ALLOCATE
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import NONE, Ops
from memprof.trace.store import Trace, write_trace
from tests.analysis.plain_snapshot import exported
from tests.recorder.recorded import record_script

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
