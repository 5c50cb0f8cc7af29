"""The notebooks of the documentation run from top to bottom without a GPU, and print what they show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.building.commands import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def _verdicts(notebook: Any) -> list[str]:
    """The lines of a notebook's outputs that say what memory a job takes."""
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output)
    return [
        line.partition(". ")[0] for line in printed.splitlines() if line.startswith(("memprof: dry-ran", "predicted"))
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell fails, and the peaks are those that the saved notebook shows."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    shown = _verdicts(notebook)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert shown
    assert _verdicts(notebook) == shown
