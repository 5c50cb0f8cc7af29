"""Memory of indexing with masks on the processor, in dry runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_both

_MASKED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(64, 200)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
apart = ~torch.eye(200, dtype=torch.bool)

for _ in range(4):
    optimizer.zero_grad()
    out = net(torch.randn(32, 64))
    products = out.T @ out
    loss = SELECTED.pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "selected",
    [
        "products[apart]",
        "products.masked_select(apart)",
        "products[apart[0]]",
        "products[:, torch.arange(150, dtype=torch.int32)]",
        "products.index_put((apart,), products.detach()[apart], accumulate=True)",
        "products.index_put((apart,), torch.zeros(()))",
    ],
)
def test_positions_of_a_mask_are_counted(tmp_path: Path, selected: str) -> None:
    """Kernels first find the positions of the elements that are true, in two dimensions four times a result's bytes."""
    real, dry = record_both(tmp_path, _MASKED.replace("SELECTED", selected))
    assert dry.peak == real.peak
