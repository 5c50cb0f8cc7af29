"""What libraries' training loops do around a step, on the device of a dry run: loaders, pinned memory, threads."""

from __future__ import annotations

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
