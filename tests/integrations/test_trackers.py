"""Logging to TensorBoard, W&B, MLflow and Trackio: the real libraries, offline, read back from what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.integrations import log, summary
from memprof.integrations.trackers import TIMELINE

_RECORDING = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"
_PEAK = "memprof/peak_bytes"


def test_only_trackers_are_logged_to() -> None:
    """Anything else is refused in a sentence that names what can be given."""
    with pytest.raises(UsageError, match="SummaryWriter"):
        log(_RECORDING, [])


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    """Every figure is a scalar, and the timeline an image."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        figures = log(_RECORDING, writer, step=3)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == set(figures)
    (peak,) = read.Scalars(_PEAK)
    assert (peak.step, peak.value) == (3, pytest.approx(figures[_PEAK]))
    (image,) = read.Images(TIMELINE)
    assert (image.width, image.height) == (900, 320)


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    """An offline run has the figures in its summary, and the picture among its files."""
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    with wandb.init(project="memprof", mode="offline", dir=str(tmp_path), settings=settings) as run:
        figures = log(_RECORDING, run)
        assert run.summary[_PEAK] == figures[_PEAK]
    (image,) = tmp_path.rglob("media/images/**/*.png")
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a folder has every figure as a metric, and the picture as an artifact."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.13 and newer ask for it
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        figures = log(_RECORDING, mlflow, step=2)
    assert mlflow.get_run(run.info.run_id).data.metrics == figures
    (image,) = tmp_path.rglob("timeline.svg")
    assert "peak 88.92 MiB" in image.read_text(encoding="utf-8")


@pytest.mark.slow
def test_trackio_on_this_machine(tmp_path: Path) -> None:
    """A local project has the figures, and the picture."""
    pytest.importorskip("trackio", reason="Trackio is not installed")
    # Trackio reads its folder when it is imported.
    variables = {**os.environ, "TRACKIO_DIR": str(tmp_path), "GRADIO_ANALYTICS_ENABLED": "False"}
    subprocess.run([sys.executable, "-c", _TRACKIO, str(_RECORDING)], env=variables, check=True)
    assert json.loads((tmp_path / "logged.json").read_text()) == summary(_RECORDING)[_PEAK]
    assert list(tmp_path.rglob("*.png"))


_TRACKIO = """
import json, os, sys
from pathlib import Path
import trackio
from trackio.sqlite_storage import SQLiteStorage
from memprof.integrations import log

log(sys.argv[1], trackio.init(project="memprof", name="one", embed=False))
trackio.finish()
(row,) = SQLiteStorage.get_logs("memprof", "one")
Path(os.environ["TRACKIO_DIR"], "logged.json").write_text(json.dumps(row["memprof/peak_bytes"]))
"""
