"""The peaks that nothing was fitted to: their list, the predictions that are kept, and the figures drawn from them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from lab.benchmarks import blind_peaks, real_gpus
from lab.benchmarks.blind_peaks import CARDS, BlindPeak, Prediction, compare, read_peaks, read_predictions
from lab.benchmarks.real_gpus import Point, draw_scatter
from memprof.cli.pages.allocations_page import draw_timelines
from memprof.machines.catalogue import find_machine

PEAKS = {peak.id: peak for peak in read_peaks()}


def test_every_prediction_is_of_a_peak_and_every_peak_of_a_card_and_a_script() -> None:
    """Ids are unique, cards are in the catalogue, scripts are there, and no prediction is left over."""
    assert len(PEAKS) == len(read_peaks())
    assert set(read_predictions()) <= set(PEAKS)
    for peak in PEAKS.values():
        assert peak.bytes < find_machine(CARDS[peak.card]).memory_bytes
        assert (blind_peaks.FOLDER / "jobs" / f"{peak.job}.py").exists()
        assert peak.source.startswith("https://")


def _peak(name: str, why: str = "") -> BlindPeak:
    return BlindPeak(name, "video", "csn", "allocated", 1000, 0, "NVIDIA L40S", "2.12", "https://x", "row", why)


def test_the_first_prediction_stays_beside_the_last_and_the_bar_is_of_the_last() -> None:
    """A median of 0.5 % passes, an error of 4 % only with its reason, and a row without a prediction does not."""
    predictions = {"a": Prediction(1100, 1005), "b": Prediction(1005, 1005), "c": Prediction(1040, 1040)}
    explained = [_peak("a"), _peak("b"), _peak("c", why="another version")]
    section = compare(explained, predictions)
    assert section.rows[0][4:6] == ("+10.00 %", "+0.50 %")
    assert section.bar.endswith(": passed.")
    assert compare([_peak("a"), _peak("b"), _peak("c")], predictions).bar.endswith(": NOT passed.")
    assert compare([*explained, _peak("d")], predictions).bar.endswith(": NOT passed.")


def test_figures_are_drawings_with_a_mark_for_each_figure() -> None:
    """Each job is drawn twice, as a peak and as an error; a difference is a red band."""
    points = [Point("one", "allocated", 1 << 30, 1 << 30), Point("two", "reserved", 4 << 30, 5 << 30)]
    drawn = ET.fromstring(draw_scatter(points))
    marks = [one for one in drawn.iter("{http://www.w3.org/2000/svg}circle") if one.get("r") == "4"]
    assert len(marks) == 2 * len(points)
    live = np.array([1, 3, 2]) << 30
    drawn = ET.fromstring(draw_timelines("two sides", live, live, [(1, 2)]))
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert len([one for one in drawn.iter("{http://www.w3.org/2000/svg}rect") if one.get("opacity") == "0.25"]) == 1


def test_each_run_of_a_gpu_has_its_script_and_live_bytes() -> None:
    """As many live bytes as allocations, whose highest is the peak."""
    for run in real_gpus.read_runs():
        assert (real_gpus.FOLDER / "scripts" / f"{run.name}.py").exists()
        assert len(run.live) == len(run.sizes)
        assert int(run.live.max()) == run.peak_bytes
