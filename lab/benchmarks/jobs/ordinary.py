"""Trains a job of tests/policies/jobs at a size whose operators take milliseconds: ordinary.py NAME [--steps N]."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "policies" / "jobs"))

SIZES = {
    "gpt": {"WIDTH": 512, "LENGTH": 256, "BATCH": 4, "VOCABULARY": 4096},
    "resnet": {"SIZE": 112, "BATCH": 32},
    "unet": {"SIZE": 128, "WIDTH": 24},
}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    job = importlib.import_module(name)
    for variable, value in SIZES[name].items():
        setattr(job, variable, value)
    from training import train

    train(job.__doc__, job.make_loader, job.make_model, job.make_optimizer, job.loss_of)
