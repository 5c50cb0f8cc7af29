"""Megatron-Core as it is installed, dry-run at many ranks: its states compared with arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.store import Trace
from tests.recorder.recorded import record

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

_JOB = Path(__file__).parent / "rank_jobs" / "megatron_gpt.py"
_WIDTH, _LAYERS, _WORDS, _RANKS = 256, 2, 1024, 64
#: bf16 parameters, their gradients in fp32, and of a rank's share a copy in fp32 and two states of Adam.
_PARAMETER, _GRADIENT, _STATE = 2, 4, 4


def test_64_ranks_hold_what_a_sharded_optimizer_leaves_them(tmp_path: Path) -> None:
    """A GPT over 2 tensor-parallel ranks: few of the ranks are run, and no peak is above rank 0's by a thousandth."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    options = (*("--num-layers", str(_LAYERS)), *("--tensor-model-parallel-size", "2"), "--use-distributed-optimizer")
    ranks = ("--dry-run", "--device", "h100-80g", "--ranks", str(_RANKS))
    trace: Trace = record(tmp_path, *ranks, str(_JOB), *options, "--global-batch-size", "32").trace
    assert len(trace.ranks) <= 6
    step = trace.fresh(0).steady_step()
    held = step.storages.allocated_bytes[step.storages.category == "gradient"].sum()
    half = _WIDTH * _WIDTH * 12 // 2 * _LAYERS + 2 * _WORDS * _WIDTH // 2  # matrices, and embeddings at both ends
    whole = _LAYERS * (4 * _WIDTH + 2 * _WIDTH + (3 + 4) * _WIDTH // 2) + 2 * _WIDTH  # norms, and biases
    count = half + whole
    assert held == pytest.approx(count * _GRADIENT, rel=0.001)
    kept = step.storages.allocated_bytes[step.storages.category == "optimizer_state"].sum()
    assert kept == pytest.approx(2 * _STATE * count / (_RANKS // 2), rel=0.05)  # rounded up to blocks
