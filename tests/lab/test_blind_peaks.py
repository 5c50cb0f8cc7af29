"""The peaks that nothing was fitted to: their list, the predictions that are kept, and the figures drawn from them."""

from __future__ import annotations

from lab.benchmarks import blind_peaks, real_gpus
from lab.benchmarks.blind_peaks import CARDS, read_peaks, read_predictions
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


def test_each_run_of_a_gpu_has_its_script_and_live_bytes() -> None:
    """As many live bytes as allocations, whose highest is the peak."""
    for run in real_gpus.read_runs():
        assert (real_gpus.FOLDER / "scripts" / f"{run.name}.py").exists()
        assert len(run.live) == len(run.sizes)
        assert int(run.live.max()) == run.peak_bytes


def test_the_page_has_what_the_kept_results_say() -> None:
    """Medians, rows and the bar of docs/how-true.md are those of blind_results.json, and so are the files' rows."""
    section = blind_peaks.compare(read_peaks(), read_predictions())
    page = (real_gpus.ROOT / "docs" / "how-true.md").read_text(encoding="utf-8")
    assert section.markdown() in page
    assert section.bar is not None
    assert section.bar.sentence() in page
