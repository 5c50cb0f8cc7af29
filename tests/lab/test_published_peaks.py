"""The list of published peaks, and the verdict on predictions."""

from __future__ import annotations

import re

import pytest

from lab.benchmarks import blind_peaks
from lab.benchmarks.published_peaks import (
    BARS,
    CARDS,
    COUNTERS,
    FOLDER,
    SCRIPT,
    read_peaks,
)
from memprof.machines.catalogue import find_machine

PEAKS = {peak.id: peak for peak in read_peaks()}


def test_every_peak_has_its_own_id_and_every_job_a_peak() -> None:
    """No figure is listed twice, no row's script is missing, and no script is without a row."""
    peaks = read_peaks()
    assert len(PEAKS) == len(peaks) == 31
    text = SCRIPT.read_text(encoding="utf-8")
    assert {peak.job for peak in peaks} == set(re.findall(r'^    "(\w+)": ', text, re.MULTILINE))
    scripts = {SCRIPT.stem} | {peak.job for peak in blind_peaks.read_peaks()}
    assert scripts == {path.stem for path in (FOLDER / "jobs").glob("*.py")}


def test_no_job_is_in_both_sets() -> None:
    """What may shape an estimate never judges it: the scripts of the two sets are different ones."""
    scripts = {
        name: {peak.job for peak in PEAKS.values() if peak.set == name} for name in ("calibration", "evaluation")
    }
    assert not scripts["calibration"] & scripts["evaluation"]
    assert sum(peak.set == "calibration" for peak in PEAKS.values()) == 9
    assert sum(peak.set == "evaluation" for peak in PEAKS.values()) == 22


@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS)
def test_a_row_says_what_it_is_judged_by(peak) -> None:
    """Each row names a counter, a kind that has a bar, its source, and a card of the catalogue that would hold it."""
    assert peak.what in COUNTERS
    assert peak.kind in BARS
    assert peak.source
    assert peak.bytes < find_machine(CARDS[peak.card]).memory_bytes
    assert 0 <= peak.rounding_bytes < peak.bytes / 5
