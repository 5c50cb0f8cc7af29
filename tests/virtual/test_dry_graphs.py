"""CUDA graphs on a virtual GPU: captures allocate from pools of their own, which stay reserved."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recorder.recorded import record_script

_JOB = """
import json
import torch
from torch import nn

def reserved():
    torch.cuda.empty_cache()
    said.append(torch.cuda.memory_reserved() // (1 << 20))

said = []
model = nn.Linear(64, 64).cuda()
x = torch.randn(8 << 20, device="cuda")
first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
reserved()
with torch.cuda.graph(first):
    assert torch.cuda.is_current_stream_capturing()
    y = x * 2
assert not torch.cuda.is_current_stream_capturing()
del y
reserved()
with torch.cuda.graph(second, pool=first.pool()):
    y = x * 3
del y
reserved()
with torch.cuda.graph(third):
    y = x * 4
    del y
    y = x * 5
del y
reserved()
for graph in (first, second, third):
    graph.replay()
reserved()
try:
    torch.cuda.CUDAGraph().replay()
except RuntimeError as error:
    said.append(str(error))
print("SAID", json.dumps(said))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sample = torch.randn(8, 64, device="cuda")
model = torch.cuda.make_graphed_callables(model, (sample,))
for _ in range(4):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def test_captures_allocate_from_pools_that_stay_reserved(tmp_path: Path) -> None:
    """Results of 32 MiB: one segment for the first pool, which two graphs share, and one for the third graph's own."""
    done = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    line = next(line for line in done.stdout.splitlines() if line.startswith("SAID"))
    before, *after, refused = json.loads(line.removeprefix("SAID"))
    assert [size - before for size in after] == [32, 32, 64, 64]
    assert "without a preceding successful capture" in refused
    # Of the graphed callable, one for forward and one for backward.
    assert any("CUDA graphs captured: 5" in note for note in done.trace.manifest.notes)
