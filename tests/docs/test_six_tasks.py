"""What README says memprof is for: six tasks of new users, each in at most three commands, with their transcripts."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from tests.analysis.test_snapshot_plans import training
from tests.cli.test_hints import _JOB, run

ROOT = Path(__file__).parents[2]
_LEAK = """
import torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(60):
    if step % 6 == 5:
        kept.append(model(torch.randn(512, 256)).detach())
    model(torch.randn(512, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: A task; its commands, each with the exit status and what stands in its output.
TASKS = {
    "it ran out of memory on 16 GB": (
        ("record --device t4 --strict -o oom.memprof train.py 2400000", 1, "out of memory: aten."),
        ("fit --device t4 -o fitted train.py 2048", 0, "fits"),
    ),
    "a colleague's snapshot": (
        ("import gpu.pickle -o gpu.memprof", 0, "next: memprof report gpu.memprof"),
        ("report gpu.memprof", 0, "Live bytes at the peak, by category"),
        ("suggest gpu.memprof --budget 80%", 0, "Within "),
    ),
    "memory grows once an epoch": (
        ("record -o window.memprof leak.py", 0, "later steps left 5.00 MiB so far, 512x256 float32, held by `kept["),
        ("record --light -o run.memprof leak.py", 0, "made at leak.py:8, held by `kept["),
        ("report run.memprof --leaks", 0, "(list) in leak.py:5"),
    ),
    "LoRA on 16 GB, before renting": (
        ("record --device t4 -o lora.memprof lora_job.py", 0, "T4: needs"),
        ("suggest lora.memprof --device t4 --allow checkpoint --no-run --write plan.toml", 0, "record --dry-run"),
        ("record --device t4 --plan plan.toml -o fits.memprof lora_job.py", 0, "within the budget, in a dry run"),
    ),
    "a gate in CI": (
        ("export run.memprof --to summary -o memory.json", 0, "memory.json"),
        ("record --quiet --stop -o head.memprof train.py 4096", 0, ""),
        ("diff memory.json head.memprof --fail-on peak>+2% --ignore batch", 4, "FAILED"),
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_at_most_three_commands(task: str, tmp_path: Path) -> None:
    """Each ends as a user expects, and says what the task asks for; the sixth is `memprof demo` (tests/cli)."""
    (tmp_path / "train.py").write_text(_JOB)
    (tmp_path / "leak.py").write_text(_LEAK)
    shutil.copy(ROOT / "lab" / "pictures" / "lora_job.py", tmp_path)
    (tmp_path / "gpu.pickle").write_bytes(pickle.dumps(training()))
    if task == "a gate in CI":
        assert run(tmp_path, "record --quiet --stop -o run.memprof train.py 2048")[0] == 0
    assert len(TASKS[task]) <= 3
    for words, status, part in TASKS[task]:
        ended, said = run(tmp_path, words)
        assert ended == status, f"{words}: {said}"
        assert part in said, f"{words}: {said}"
