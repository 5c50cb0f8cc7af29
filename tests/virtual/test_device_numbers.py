"""A device given by its number alone, as jobs with a rank give it, is the card of a dry run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recorder.recorded import record_script

_JOB = """
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
    ended = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    places = json.loads(ended.stdout)
    assert set(places.values()) == {"cuda:0"}, places
    storages = ended.step.storages
    assert set(storages.device[storages.category == "parameter"]) == {"cuda:0"}
