"""What older jobs write for a GPU runs on the card of a dry run, with a torch built without CUDA too."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recorder.recorded import record_script

_JOB = """
import json
import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
rows = Tensor(np.ones((4, 64)))
found = {
    "values": [str(rows.dtype), list(rows.shape), str(rows.device)],
    "size": [list(Tensor(3, 2).shape), list(Tensor(torch.Size([5])).shape), list(Tensor().shape)],
    "kinds": [isinstance(rows, Tensor), isinstance(rows, torch.cuda.LongTensor), isinstance(torch.ones(1), Tensor)],
    "type": [str(torch.ones(2).type(kind).dtype) for kind in (torch.cuda.HalfTensor, "torch.cuda.LongTensor")],
    "name": rows.type(),
    "nccl": list(torch.cuda.nccl.version())[:2],
}
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    ahead = torch.ones(8, 64).cuda(non_blocking=True)
torch.cuda.current_stream().wait_stream(stream)
ahead.record_stream(torch.cuda.current_stream())
torch.Event(device="cuda", enable_timing=True).record(torch.Stream("cuda"))

model = nn.DataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).cuda(), device_ids=[0])
torch.save(model.state_dict(), "model.pt")
state = torch.load("model.pt", map_location=lambda storage, place: storage.cuda(0))
found["loaded"] = [str(state["module.0.weight"].device)]
state = torch.load("model.pt", map_location=lambda storage, place: storage)
found["loaded"].append(str(state["module.0.weight"].device))
print(json.dumps(found), flush=True)
optimizer = torch.optim.Adam(model.parameters())
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
    for step in range(4):
        loss = model(ahead).square().mean() + model(torch.ones(8, 64)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_older_names_are_there(tmp_path: Path) -> None:
    """Types of tensors, DataParallel, streams, functions that say where to load, and a profile of the GPU."""
    ended = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "Failed to record CUDA event" not in ended.stderr  # torch would print it, and a stack, for every operator
    assert json.loads(ended.stdout.strip().splitlines()[-1]) == {
        "values": ["torch.float32", [4, 64], "cuda:0"],
        "size": [[3, 2], [5], [0]],
        "kinds": [True, False, False],
        "type": ["torch.float16", "torch.int64"],
        "name": "torch.cuda.FloatTensor",
        "nccl": [2, 27],
        "loaded": ["cuda:0", "cpu"],
    }
    assert set(ended.step.ops.phase) >= {"forward", "backward", "optimizer"}


def test_default_type_of_tensors_is_the_cards(tmp_path: Path) -> None:
    """As scripts of one GPU begin: every tensor is created there from then on."""
    ended = record_script(
        tmp_path,
        "import torch\n"
        'torch.set_default_tensor_type("torch.cuda.FloatTensor")\n'
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(4):\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n",
        "--dry-run",
        "--device",
        "rtx4090",
    )
    storages = ended.step.storages
    assert set(storages.device[storages.category == "parameter"]) == {"cuda:0"}
