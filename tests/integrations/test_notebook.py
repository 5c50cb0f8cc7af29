"""The notebook magic, in an IPython shell."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memprof.trace.store import Trace

pytest.importorskip("IPython", reason="IPython is not installed")

_SETUP = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_LOOP = """
for number in range(7):
    optimizer.zero_grad()
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell.instance(profile_dir=None, ipython_dir=str(tmp_path_factory.mktemp("ipython")))
    made.run_cell("%load_ext memprof").raise_error()
    made.run_cell(_SETUP).raise_error()
    yield made
    # What the cells made would be found by recordings after this: nothing of the shell stays.
    made.reset(new_session=False)
    made.restore_sys_module_state()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    InteractiveShell.clear_instance()
    gc.collect()


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_cell_is_recorded_and_reported(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The cell's variables are the notebook's, and its report follows."""
    shell.run_cell(f"%%memprof --steps 2\n{_LOOP}\nleft = number").raise_error()
    assert shell.user_ns["left"] == 6
    assert Trace.open("cell.memprof").recorded_steps == (2, 3)
    told = capsys.readouterr().out
    assert "Live bytes at the peak, by category" in told
    shell.run_cell(f"%%memprof --report none\n{_LOOP}").raise_error()  # replaces it
    assert "Live bytes at the peak" not in capsys.readouterr().out
    assert Trace.open("cell.memprof").recorded_steps == (2, 3, 4)


def test_error_of_the_cell_is_shown(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What the cell raises is shown as ever, and what was recorded until then is kept."""
    shell.run_cell(f"%%memprof -o failed.memprof --report none\n{_LOOP}\n1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert Trace.open("failed.memprof").recorded_steps == (2, 3, 4)


def test_file_that_exists_is_not_replaced(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With a name of its own, a recording is only replaced with -f; the cell is not run in vain."""
    Path("mine.memprof").write_text("mine")
    shell.run_cell("%%memprof -o mine.memprof\nran = True")
    assert "exists already" in "".join(capsys.readouterr())
    assert "ran" not in shell.user_ns
    assert Path("mine.memprof").read_text() == "mine"


def test_cell_without_torch_is_just_run(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that runs no operator leaves no file, and a message says so."""
    shell.run_cell("%%memprof -o none.memprof\nanswer = 42").raise_error()
    assert shell.user_ns["answer"] == 42
    assert "no operator of torch ran" in "".join(capsys.readouterr())
    assert not Path("none.memprof").exists()


@pytest.mark.slow
def test_page_with_figures(shell: Any) -> None:
    """--report html writes a page next to the recording."""
    pytest.importorskip("memprof_dashboard.export_page.export", reason="the dashboard is not installed")
    shell.run_cell(f"%%memprof -o page.memprof --report html\n{_LOOP}").raise_error()
    assert "<html" in Path("page.html").read_text(encoding="utf-8")
