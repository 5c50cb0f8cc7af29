"""Emitted FSDP2 code divides a job over two ranks as memprof does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.emit.emission import Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PLAN = """
[shard]
world_size = 2
[precision]
dtype = "bf16"
[checkpoint]
modules = ["layers.[0-1]"]
[optimizer]
loop = "foreach"
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, under memprof and as emitted."""
    folder = tmp_path_factory.mktemp("fsdp2")
    (folder / "plan.toml").write_text(PLAN)
    emitted = target_named("fsdp2").emit(Request(parse_plan(PLAN), "plan.toml"))
    assert not emitted.cannot
    (folder / "under_plan.py").write_text(emitted.text)
    files = [str(folder / name) for name in ("under_plan.py", "plan.toml", "found")]
    done = subprocess.run(
        [*TORCHRUN, "-m", "tests.emit.ranks", *files],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow  # torchrun, and two trainings in each rank
def test_ranks_train_as_under_memprof(ranks: list[dict[str, Any]]) -> None:
    """Each rank's losses are equal to the bit, and those of the two differ: they have batches of their own."""
    for found in ranks:
        assert found["emitted"]["losses"] == found["applied"]["losses"]
    assert ranks[0]["emitted"]["losses"] != ranks[1]["emitted"]["losses"]


@pytest.mark.slow  # torchrun, and two trainings in each rank
def test_each_rank_holds_its_half(ranks: list[dict[str, Any]]) -> None:
    """The parts of parameters are as large as memprof's, and the peak is the same to the byte.

    Except for 8 bytes: the mesh of memprof's run, two ranks' numbers, is still alive in the second run of the process.
    """
    for found in ranks:
        assert found["emitted"]["parameter_bytes"] == found["applied"]["parameter_bytes"]
        assert found["emitted"]["peak_bytes"] - found["applied"]["peak_bytes"] in (0, 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[shard]\nstage = 1\nworld_size = 2", "fully_shard shards parameters too (stages 2 and 3)"),
        ("[checkpoint]\nmodules = ['layers.*']", "the plan shards nothing that fully_shard supports"),
    ],
)
def test_what_divides_no_parameters_is_not_fsdp2(text: str, part: str) -> None:
    """Stage 1, and plans of one process: nothing is written, and the sentence names the target that would do."""
    emitted = target_named("fsdp2").emit(Request(parse_plan(text), "plan.toml"))
    assert not emitted.expressed
    assert part in " ".join(emitted.cannot)


def test_what_does_not_go_with_divided_parameters_is_left_out() -> None:
    """As memprof refuses it: steps in backward, state elsewhere, weights in bf16; the loop of updates is there."""
    text = (
        "[shard]\nstage = 2\nworld_size = 2\nunits = ['layers.*']\n[precision]\nweights = 'bf16'\n[swap]\n"
        "what = 'parameters'\n[optimizer]\nin_backward = true"
    )
    emitted = target_named("fsdp2").emit(Request(parse_plan(text), "plan.toml"))
    assert [sentence.split(":")[0] for sentence in emitted.cannot] == [
        "precision pure-bf16",
        "swap parameters to host",
        "optimizer in-backward",
    ]
    assert "reshard_after_forward=False" in emitted.text
    assert r'_modules(model, [r"layers\.[^.]*"])' in emitted.text
