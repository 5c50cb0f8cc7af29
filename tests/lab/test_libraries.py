"""The fast part of the matrix of libraries, with what the extra `integrations` installs, and how its table is made."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.libraries import measure
from lab.libraries.cells import cells, families

FAST = {"gat": "rtx4090", "x-transformers": "h100-80g", "wav2vec2-sdpa": "rtx4090"}
NAMED = {cell.name: cell for cell in cells()}


@pytest.mark.parametrize("name", FAST)
def test_a_training_is_dry_run_on_a_card(name: str, tmp_path: Path) -> None:
    """It is a number: forward, backward and update were seen, and the model lies on the card."""
    cell = NAMED[name]
    if find_spec(cell.library.replace("-", "_")) is None:
        pytest.skip(f"{cell.library} is not installed")
    found = measure.recording(tmp_path, "card", [str(cell.path), *cell.arguments], "--dry-run", "--device", FAST[name])
    assert found.get("peak", 0) > 2**20, found


def test_every_cell_is_there() -> None:
    """Scripts exist, names are unique, and there are as many families as promised."""
    assert len(NAMED) == len(cells())
    assert all(cell.path.exists() for cell in cells())
    assert len(families()) >= 20
    assert sum(cell.library == "timm" for cell in cells()) >= 10
