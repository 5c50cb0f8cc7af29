"""The magic in a real notebook, run by Jupyter's client with a kernel of its own, and exported without JavaScript."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

_SETUP = """\
import torch
parts = (torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4))
model = torch.nn.Sequential(*parts)
optimizer = torch.optim.Adam(model.parameters())
"""
_TRAINING = """\
%%memprof --what-if
for _ in range(6):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# What a click on the widget's button does.
_CLICK = """\
from memprof.integrations import what_if
row, answer = what_if("cell.memprof").children
row.children[1].click()
print(answer.value)
"""
_CELLS = ("%load_ext memprof", _SETUP, _TRAINING, _CLICK)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in _CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return notebook


def _printed(cell: Any, stream: str = "stdout") -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == stream)


def test_cell_shows_verdict_next_step_and_timeline(executed: Any) -> None:
    """Below the cell: one sentence with the peak, the command to run next, and the timeline in two forms."""
    cell = executed.cells[2]
    assert "recorded 3 steps of this cell: peak " in _printed(cell)
    assert "next: memprof report cell.memprof" in _printed(cell)
    assert not _printed(cell, "stderr")
    timeline, widget = (output.data for output in cell.outputs if output.output_type == "display_data")
    figure = timeline["application/vnd.plotly.v1+json"]
    assert {"activations", "parameters", "optimizer state"} <= {trace["name"] for trace in figure["data"]}
    assert "<script" not in timeline["image/svg+xml"]
    assert "peak " in timeline["image/svg+xml"]
    assert "application/vnd.jupyter.widget-view+json" in widget


def test_widget_lists_plans_within_the_budget(executed: Any) -> None:
    """A click searches at the slider's budget, and lists plans with predicted peak and step time."""
    printed = _printed(executed.cells[3])
    assert printed.count("<tr>") > 1
    assert "memprof suggest cell.memprof --budget 70% --write plan.toml" in printed


def test_page_without_javascript_has_the_picture(executed: Any) -> None:
    """A page that nbconvert exports without scripts shows the timeline's SVG."""
    nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
    exporter = nbconvert.MarkdownExporter()
    _, resources = exporter.from_notebook_node(executed)
    assert any(name.endswith(".svg") for name in resources["outputs"])
