"""The callback in a training of several processes: each records its own file, and one searches for all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace
from tests.integrations.two_ranks import run_on_two_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

_JOB = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from memprof.integrations.hf import MemprofCallback

set_seed(0)
rows = [torch.randint(0, 256, (32,)) for _ in range(128)]
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=48, n_layer=3, n_head=3, bos_token_id=0, eos_token_id=0)
callback = MemprofCallback("run.memprof", force=True, **json.loads(sys.argv[1]))
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        "out", max_steps=7, per_device_train_batch_size=8, use_cpu=True, ddp_backend="gloo", report_to=[],
        save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[callback],
)
trainer.train()
if trainer.args.process_index == 0:
    print("ARGUMENTS", json.dumps(callback.arguments), flush=True)
"""


def _train(folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return run_on_two_ranks(folder, _JOB, json.dumps(settings))


@pytest.mark.slow
def test_two_ranks_are_recorded_and_fitted(tmp_path: Path) -> None:
    """Each rank has a file; one plan and one set of arguments are found, and the plan holds on every rank."""
    found = _train(tmp_path, budget="75%", time_limit=10)
    assert found.stderr.count("memprof: recorded 3 steps") == 1
    recorded = Trace.open(tmp_path / "run.rank0.memprof"), Trace.open(tmp_path / "run.rank1.memprof")
    assert [trace.manifest.rank for trace in recorded] == [0, 1]
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("ARGUMENTS ")]
    arguments = json.loads(line.partition(" ")[2])
    assert {"activation_checkpointing", "gradient_checkpointing"} & set(arguments), arguments
    plan = read_plan(tmp_path / "plan.toml")
    assert plan.prediction is not None
    under = _train(tmp_path, plan="plan.toml")
    assert under.stderr.count("memprof: predicted peak") == 1
    for rank in (0, 1):
        peak = max(Trace.open(tmp_path / f"run.rank{rank}.memprof").step_peaks().values())
        assert peak <= plan.prediction.interval.most_bytes
