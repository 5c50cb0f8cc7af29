"""What libraries' training loops do around a step, on the device of a dry run: loaders, pinned memory, threads."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import record_script

_JOB = """
import torch
from torch.utils.data import DataLoader, TensorDataset

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
    """With workers, torch's loader pins memory in a thread of its own; the batches reach the device."""
    ended = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    storages = ended.step.storages
    batches = storages.requested_bytes[storages.device == "cuda:0"].tolist()
    assert 8 * 32 * 4 in batches
