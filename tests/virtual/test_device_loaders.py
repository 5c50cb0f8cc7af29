"""What scripts and libraries do around a device: numbers, defaults, loaders, and what older jobs write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.trace.schema import HostNeeds
from tests.recorder.recorded import record_script

_JOB = """
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":  # workers are not forked from Python 3.14 on
    early = torch.zeros(3 * 2**20, dtype=torch.uint8, pin_memory=True)  # before anything is on the device
    assert early.is_pinned()
    assert torch.tensor([7, 8], pin_memory=True).cuda(non_blocking=True).is_cuda
    data = TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
    model = torch.nn.Linear(32, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for rows, labels in DataLoader(data, batch_size=8, num_workers=1, pin_memory=True, persistent_workers=True):
        loss = torch.nn.functional.cross_entropy(model(rows.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.from_file(__file__, False, 7, dtype=torch.uint8).tolist() == list(b"\\nimport")
"""


def test_a_loader_pins_its_batches_in_a_thread(tmp_path: Path) -> None:
    """With workers, torch's loader pins memory in a thread of its own; the batches reach the device.

    What the job pins before it uses the device is pinned, too: this machine needs no GPU for it.
    """
    ended = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    storages = ended.step.storages
    batches = storages.requested_bytes[storages.device == "cuda:0"].tolist()
    assert 8 * 32 * 4 in batches
    needs = ended.trace.table(HostNeeds)
    assert (3 * 2**20, 4 * 2**20) in zip(needs.requested_bytes.tolist(), needs.size_bytes.tolist(), strict=True)


#: As torchvision's transforms are: modules that the data set calls, in the loader's workers.
_TRANSFORMED = """
import torch
from torch.utils.data import DataLoader, Dataset

class Flip(torch.nn.Module):
    def forward(self, row):
        return row.flip(0) if torch.rand(1) < 0.5 else row

class Rows(Dataset):
    flip = torch.nn.Sequential(Flip(), torch.nn.Identity())

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return self.flip(torch.randn(32)), number % 4

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(32, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows, labels in DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="METHOD"):
        loss = torch.nn.functional.cross_entropy(model(rows.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("method", "options"),
    [("fork", ()), ("fork", ("--light",)), ("fork", ("--dry-run", "--device", "rtx4090")), ("spawn", ("--dry-run",))],
)
def test_workers_whose_transforms_are_modules_are_not_ranks(
    method: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """A loader's workers are no processes that train: the recording is of the training alone, with all its phases."""
    ended = record_script(tmp_path, _TRANSFORMED.replace("METHOD", method), *options)
    assert len(ended.trace.ranks) == 1
    assert {"forward", "backward", "optimizer"} <= set(ended.step.ops.phase)


#: As torchtune packs its samples: FlexAttention's masks are made by torch.vmap, on the device.
_PACKED = """
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import DataLoader

def collate(samples):
    documents = torch.stack(samples).to("cuda") // 100
    mask = lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k])
    return create_block_mask(mask, 2, None, 256, 256, device="cuda")

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for mask in DataLoader([torch.arange(256)] * 12, 2, collate_fn=collate):
    print(mask.kv_num_blocks.device)
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loader_makes_block_masks_on_the_device(tmp_path: Path) -> None:
    """torch.vmap calls operators without a mode of the dry run where the loader reads data for real."""
    ended = record_script(tmp_path, _PACKED, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) == {"cuda:0"}


JOB = """
import numpy as np
import torch
{around}
    made = [
        torch.tensor([1.0]),
        torch.as_tensor([1, 2], dtype=int),
        torch.as_tensor(np.ones(3)),
        torch.as_tensor(torch.ones(3, device="cpu")),
        torch.asarray([1.0]),
        torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)),
        torch.as_tensor(np.ones(3), device="cpu"),
    ]
    print(*(tensor.device.type for tensor in made))
    assert torch.cuda.get_rng_state().device.type == "cpu"
    model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("around", ['torch.set_default_device("cuda")\nif True:', 'with torch.device("cuda"):'])
def test_tensors_of_given_values_are_made_on_the_default_device(tmp_path: Path, around: str) -> None:
    """Torch moves them there without an operator: the device is known below all function modes only."""
    ended = record_script(tmp_path, JOB.format(around=around), "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == " ".join(["cuda"] * 6 + ["cpu"])
    assert ended.step.number >= 1


_NUMBERED_JOB = """
import json, os, torch
from torch import nn

rank = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(rank)
rows = torch.ones(2, 64)
places = {
    "torch.device": torch.device(rank), "Tensor.to": rows.to(rank), "Tensor.to and type": rows.to(rank, torch.float16),
    "Tensor.to by name": rows.to(device=rank), "Module.to": nn.Linear(2, 2).to(rank).weight,
    "Module.to by name": nn.Linear(2, 2).to(device=rank).weight, "Module's own": nn.Linear(2, 2, device=rank).weight,
    "zeros": torch.zeros(2, device=rank), "tensor": torch.tensor([1, 2], device=rank),
    "as_tensor": torch.as_tensor([1], device=rank), "new_zeros": rows.new_zeros(2, device=rank),
    "new_tensor": rows.new_tensor([2], device=rank), "like": torch.empty_like(rows, device=rank),
}
with torch.device(rank):
    places["with"] = torch.zeros(2)
print(json.dumps({name: str(getattr(value, "device", value)) for name, value in places.items()}))
for wrong in (lambda: rows.to(1), lambda: torch.zeros(2, device=1)):
    try:
        wrong()
    except RuntimeError as error:
        assert "invalid device ordinal" in str(error), error
    else:
        raise AssertionError("there is no second device")
model = nn.Linear(64, 64).to(rank)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(8, 64).to(rank, non_blocking=True)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_numbers_name_the_card(tmp_path: Path) -> None:
    """Wherever torch takes a device, a number is one of the accelerator's, on a torch built without CUDA too."""
    ended = record_script(tmp_path, _NUMBERED_JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    places = json.loads(ended.stdout)
    assert set(places.values()) == {"cuda:0"}, places
    storages = ended.step.storages
    assert set(storages.device[storages.category == "parameter"]) == {"cuda:0"}


_OLD_JOB = """
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
    ended = record_script(tmp_path, _OLD_JOB, "--dry-run", "--device", "rtx4090")
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
