"""Steps at a length that was not recorded, from one recording of several lengths, against recordings at that length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.plans.another_size import at_batch, at_length
from memprof.analysis.plans.basis import Basis, basis_of, whole_steps
from memprof.errors import InconclusiveError
from memprof.planners.scaling.curves import fit, smoothed
from memprof.planners.scaling.doubt import SEEN, left_out_error
from memprof.planners.scaling.samples import find_samples
from memprof.planners.scaling.sized import scale_samples
from memprof.planners.scaling.times import Clock
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_step
from tests.planners.lengths import record_lengths
from tests.planners.sizes import peak_bytes

#: The first two are the warm-up.
MIXED = (24, 40, 16, 32, 24, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings at several lengths, and at 64 alone."""
    path = tmp_path_factory.mktemp("lengths")
    record_lengths(path / "mixed.memprof", MIXED)
    record_lengths(path / "64.memprof", [64] * 4)
    return path


def at(path: Path, length: int, *also: Path) -> Basis:
    """The steps of a recording at another length."""
    trace = Trace.open(path)
    return at_length(basis_of(trace), [whole_steps(trace), *(whole_steps(Trace.open(one)) for one in also)], length)


def test_a_length_that_was_not_recorded_is_exact(folder: Path) -> None:
    """From steps of 16, 24, 32 and 40, a step of 64 has the measured bytes exactly, at its peak as elsewhere.

    The workspace of flash attention is padded to tiles: it is a guess, and not at the peak.
    """
    made, measured = at(folder / "mixed.memprof", 64), Trace.open(folder / "64.memprof").steady_step()
    made.step.check()
    assert peak_bytes(made.step) == peak_bytes(measured)
    is_tiled = np.array(["flash_attention" in name for name in measured.ops.name.tolist()])
    assert np.array_equal(live_bytes(made.step).after, live_bytes(measured).after)
    assert np.array_equal(live_bytes(made.step).during[~is_tiled], live_bytes(measured).during[~is_tiled])
    is_made = np.append(measured.ops.phase, "")[measured.storages.created_op_id] == "forward"
    # Outputs of one operator are in no fixed order.
    assert sorted(made.step.storages.shape[is_made]) == sorted(measured.storages.shape[is_made])
    assert any(warning.startswith("guess: the workspace of 6 operators") for warning in made.warnings)
    assert (made.length, made.source, made.others) == (64, "modelled", ())


@pytest.mark.parametrize(
    "policy", [Checkpoint(modules=("layers.*",)), Swap(modules=("layers.*",), to="disk", minimum_bytes=4096)]
)
def test_plans_hold_there(folder: Path, tmp_path: Path, policy: Policy) -> None:
    """The peak of a step of 64 under a plan, predicted from shorter ones, is within its bounds when it is run."""
    plan, _ = at(folder / "mixed.memprof", 64).predict(Plan((policy,)))
    measured = Trace.open(record_lengths(tmp_path / "run.memprof", [64] * 4, plan)).steady_step()
    assert plan.at_length == 64
    assert plan.prediction is not None
    interval = plan.prediction.interval
    assert interval is not None
    assert not interval.is_exact
    assert interval.least_bytes <= peak_bytes(measured) <= interval.most_bytes
    error = plan.prediction.peak_allocated_bytes / peak_bytes(measured) - 1
    assert abs(error) <= 0.01, f"{plan.prediction.peak_allocated_bytes:,} of {peak_bytes(measured):,}"


def test_two_lengths_say_how_sure_they_are(tmp_path: Path) -> None:
    """Shapes show what grows with the square from two lengths too; what they do not show widens the bounds."""
    path = record_lengths(tmp_path / "two.memprof", (24, 24, 16, 32, 16))
    made = at(path, 64)
    measured = Trace.open(record_lengths(tmp_path / "64.memprof", [64] * 4)).steady_step()
    below, above = made.step.size_errors
    assert below == SEEN
    assert above >= SEEN
    assert abs(peak_bytes(made.step) / peak_bytes(measured) - 1) <= 0.01
    interval = Plan().predict(made.step)[0].prediction
    assert interval is not None
    assert interval.least_peak_bytes <= peak_bytes(measured) <= interval.most_peak_bytes


def test_one_length_is_refused(folder: Path) -> None:
    """Nothing can be learned from steps of one length; another recording with a second one is enough."""
    with pytest.raises(InconclusiveError, match=r"no size differs, all ran on 4x64, 4x63.*--also TRACE"):
        at(folder / "64.memprof", 128)
    assert at(folder / "64.memprof", 128, folder / "mixed.memprof").length == 128


def test_a_smaller_last_batch_is_left_out(tmp_path: Path) -> None:
    """The batch at the end of a data set differs in more than the length: it counts as it was recorded."""
    path = record_lengths(tmp_path / "last.memprof", (24, 24, 16, 32, 24, 40), batch=3)
    steps = whole_steps(Trace.open(path))
    found = find_samples([steps], advice="Record more.")
    assert [sample.size for sample in found.samples] == [16, 24, 32]
    assert [step.number for step in found.skipped] == [steps[-1].number]
    assert found.where == "dimension 2 of an input"
    assert found.shapes == ("3x16", "3x32")


def test_batches_of_one_recording_serve(tmp_path: Path) -> None:
    """Where the steps of a recording differ in the batch, --at-batch follows what was measured at them."""
    path = record_lengths(tmp_path / "last.memprof", (24, 24, 24, 24, 24), batch=6)
    trace = Trace.open(path)
    made = at_batch(basis_of(trace), [whole_steps(trace)], 4)
    measured = Trace.open(record_lengths(tmp_path / "4.memprof", [24] * 4)).steady_step()
    assert made.source == "modelled"
    assert peak_bytes(made.step) == peak_bytes(measured)


def test_two_sizes_at_once_are_refused() -> None:
    """Steps that differ in the batch and in the length do not show which of them grows."""
    steps = [sized(batch, length) for batch, length in ((2, 8), (4, 8), (4, 16))]
    told = r"more than one size differs \(dimension . of .x.* and dimension . of .*one of them only"
    with pytest.raises(InconclusiveError, match=told):
        find_samples([steps], advice="Record more.")


def test_a_part_of_the_data_set_shows_its_size_in_forward() -> None:
    """A batch that is a slice of one large tensor has no storage of its own: what forward makes of it does."""
    storages = (Storage("data", 4000, "input", shape="1000"),)
    steps = [
        make_step((Op(reads=("data",), makes=("y",)),), (*storages, Storage("y", 4 * length * 4, shape=f"{length}x4")))
        for length in (8, 16)
    ]
    found = find_samples([steps], advice="Record more.")
    assert [sample.size for sample in found.samples] == [8, 16]
    assert found.where == "dimension 1 of what forward makes"


def test_what_follows_no_polynomial_is_a_guess() -> None:
    """A kernel that pads to tiles of 16 is guessed, and the most that is said of it is no less than it takes."""
    steps = [tiled(length) for length in (20, 30, 50, 70)]
    sized_step = scale_samples(find_samples([steps], advice="").samples, may_be_square=True)
    assert sized_step.guessed(100).sum() == 1
    assert left_out_error(sized_step) > 0
    assert peak_bytes(sized_step.learned(100, at_most=True)) >= peak_bytes(tiled(100))


def test_points_on_no_curve_are_bounded() -> None:
    """At a size that was measured a guess is what was measured; between two sizes it is bounded by its neighbours."""
    sizes, values = np.array([2.0, 4.0, 6.0, 8.0]), np.array([[4.0], [9.0], [9.0], [30.0]])
    assert fit(sizes, values, values, 6.0, may_be_square=True).likely.tolist() == [9.0]
    between = fit(sizes, values, values, 5.0, may_be_square=True)
    assert between.likely.tolist() == between.most.tolist() == [9.0]
    assert not between.is_sure.any()
    beyond = fit(sizes, values, values, 16.0, may_be_square=True)
    assert 60.0 <= beyond.likely[0] <= beyond.most[0]


def test_times_of_many_sizes_are_smoothed() -> None:
    """Noise in one of many times moves the line a little; it neither falls nor goes below nothing."""
    points = np.repeat(np.array([1.0, 2.0, 3.0, 4.0])[:, None], 3, axis=1)
    values = np.array([[1.0, 9.0, 0.0], [2.0, 7.0, 0.0], [3.2, 5.0, 1.0], [3.8, 3.0, 9.0]])
    found = smoothed(points, values, np.full(3, 8.0))
    assert 7.0 < found[0] < 9.0
    assert found[1] == values[:, 1].mean()
    assert found[2] == 2 * 2 * values[:, 2].mean() * 0.8


def test_times_grow_from_one_timed_step() -> None:
    """All steps of a recording have the times of one; elsewhere each operator's grows by the bytes it touches."""
    steps = [sized(4, length) for length in (8, 16, 32)]
    steps = [dataclasses.replace(step, number=number, duration_us=50.0) for number, step in enumerate(steps)]
    learned = scale_samples(find_samples([steps], advice="").samples, may_be_square=True)
    clock = Clock(learned.samples, learned.match.ops)
    assert clock.is_guessed
    assert [learned.samples[place].size for place in clock.timed] == [16]
    before, after = steps[1].ops.duration_us, learned.step_at(64).ops.duration_us
    assert np.allclose(after, 4 * before)
    assert learned.step_at(64).duration_us == pytest.approx(4 * 50.0)


def test_times_of_several_recordings_are_their_own() -> None:
    """Recordings of one length each show how the times grow."""
    runs = []
    for length, time_us in ((8, 10.0), (16, 14.0), (32, 22.0)):
        step = sized(4, length)
        ops = step.ops.replace(duration_us=np.full(len(step.ops), time_us))
        runs.append([dataclasses.replace(step, ops=ops, duration_us=time_us)])
    learned = scale_samples(find_samples(runs, advice="").samples, may_be_square=True)
    assert not Clock(learned.samples, learned.match.ops).is_guessed
    assert learned.step_at(64).duration_us == pytest.approx(38.0)
    assert np.allclose(learned.step_at(64).ops.duration_us, 38.0)


def sized(batch: int, length: int) -> Step:
    """A step on a batch of sequences."""
    shape = f"{batch}x{length}"
    size = batch * length * 4
    return make_step((Op(reads=("x",), makes=("y",)),), (Storage("x", size, "input", shape=shape), Storage("y", size)))


def tiled(length: int) -> Step:
    """A step whose output is padded to tiles of 16."""
    tiles = -(-length // 16) * 16
    storages = (Storage("x", 4 * length, "input", shape=str(length)), Storage("y", 1000 * tiles))
    return make_step((Op(reads=("x",), makes=("y",)),), storages)
