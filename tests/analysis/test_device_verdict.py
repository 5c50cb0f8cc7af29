"""Whether a job fits: a budget, a card, and nothing to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.allocator.device_verdict import DOES_NOT_FIT, FITS, NO_LIMIT, dry_fit, judge_device
from memprof.cli.main import main
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.schema import DeviceMemory
from memprof.trace.store import Trace, write_trace
from tests.building import Tables

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"
GIB = 1 << 30


def test_the_cpu_has_no_limit() -> None:
    """Without a budget there is nothing to say of a recording of the CPU."""
    assert judge_device(Trace.open(SAMPLE)).state == NO_LIMIT


@pytest.mark.parametrize(
    ("budget", "state", "sentence"),
    [
        (93_237_072, FITS, "Within the budget, measured: 88.92 of 88.92 MiB"),
        (93_237_072 - (1 << 20), DOES_NOT_FIT, "Over the budget by 1.00 MiB: 88.92 of 87.92 MiB"),
    ],
)
def test_a_budget_counts_to_the_byte(budget: int, state: str, sentence: str) -> None:
    """The peak of the sample (expected.json) is within a budget of itself."""
    verdict = judge_device(Trace.open(SAMPLE), budget)
    assert (verdict.state, verdict.sentence) == (state, sentence)


def test_a_card_counts_all_of_its_memory(
    tmp_path: Path, small_tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    """What other processes and the context take counts; `report` prints the same sentence."""
    path = tmp_path / "run.memprof"
    sample = DeviceMemory(
        time_us=np.zeros(1),
        device=np.array(["cuda:0"], dtype=object),
        **{
            name: np.array([count * GIB])
            for name, count in (
                *(("total_bytes", 40), ("used_bytes", 30), ("process_bytes", 29)),
                *(("reserved_bytes", 28), ("pinned_bytes", 0)),
            )
        },
    )
    manifest = Manifest(
        target="train.py", machine=Machine(device_kind="cuda", device_name="A card", capacity_bytes=40 * GIB)
    )
    write_trace(path, [(manifest, {**small_tables, DeviceMemory: sample})])
    verdict = judge_device(Trace.open(path))
    assert verdict.sentence == "Fits on A card: used 30.00 of 40.00 GiB, 10.00 GiB free"
    assert verdict.parts == "28.00 GiB reserved by torch, 2.00 GiB outside its allocator"
    assert dry_fit(Trace.open(path)) is None
    assert main(["report", str(path)]) == 0
    assert f"{verdict.sentence}; {verdict.parts}." in capsys.readouterr().out
