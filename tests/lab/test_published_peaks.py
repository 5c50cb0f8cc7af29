"""The list of published peaks, and the verdict on predictions."""

from __future__ import annotations

import re

import pytest
import torch

from lab.benchmarks import blind_peaks
from lab.benchmarks.jobs.fake_counts import LiveStorages
from lab.benchmarks.published_peaks import (
    BARS,
    CARDS,
    COUNTERS,
    FOLDER,
    OURS,
    PEERS,
    SCRIPT,
    Counted,
    compare,
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


def test_errors_are_whole_and_roundings_beside_them() -> None:
    """6 GB, printed to one digit, may be 8 % off either way, which is said; 6.6 GB are 10 % too much all the same."""
    peak = PEAKS["vit_l_16_tutorial"]
    assert peak.doubt == " (source: ±8 %)"
    assert PEAKS["course_lm_allocated"].doubt == ""
    assert peak.error(6_600_000_000) == pytest.approx(10)
    assert peak.error(5_400_000_000) == pytest.approx(-10)


def test_the_bar_is_of_allocated_bytes_of_the_evaluation_set() -> None:
    """Errors of 0 and 5 % pass the bar of 3 %, of 10 and 5 % do not; rows of other counters and sets do not count."""
    ids = ("vit_l_16_tutorial", "course_lm_allocated", "gpt2_bf16", "small_transformer")
    peaks = [PEAKS[name] for name in ids]
    counted = {(name, peak.id): Counted(peak.bytes) for name in (OURS, *PEERS) for peak in peaks}
    counted[OURS, "course_lm_allocated"] = Counted(round(1.05 * PEAKS["course_lm_allocated"].bytes))
    # Allocated and for evaluation: errors of 0 and 5 %, in the middle 2.5 %.
    assert "median, transformer (2)" in [row[0] for row in compare(peaks, counted).rows]
    assert compare(peaks, counted).bar.endswith(": passed.")
    counted[OURS, "vit_l_16_tutorial"] = Counted(round(1.10 * PEAKS["vit_l_16_tutorial"].bytes))
    assert compare(peaks, counted).bar.endswith(": NOT passed.")


def test_a_count_that_failed_says_so_and_is_in_no_median() -> None:
    """A job on which another tool fails shows the reason, and the median shows its number of jobs."""
    peaks = [PEAKS["unet_64"], PEAKS["unet_128"]]
    counted = {(name, peak.id): Counted(peak.bytes) for name in (OURS, *PEERS) for peak in peaks}
    counted["MemTracker", "unet_64"] = Counted(0, "> 300 s")
    counted["MemTracker", "unet_128"] = Counted(2 * peaks[1].bytes)
    rows = {row[0]: row[-1] for row in compare(peaks, counted).rows}
    assert rows["unet_64"] == "> 300 s"
    assert rows["unet_128"] == "+100.0 %"
    assert rows["median, conv (2)"] == "100.0 % (of 1)"


def test_the_naive_count_has_storages_once_and_while_they_live() -> None:
    """Two tensors of 4,000 bytes at once, one of them viewed, and a third after both are gone: 8,000 bytes."""
    with LiveStorages() as storages:
        first = torch.zeros(1000)
        second = first.view(10, 100) + 1
        del first, second
        third = torch.zeros(1500)
    assert third.nbytes == 6000
    assert storages.peak_bytes == 8000
