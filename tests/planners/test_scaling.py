"""A step at another batch or length, against recordings of real jobs at that size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from memprof.errors import InconclusiveError, UsageError
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.scaling.base import scale_by_shape
from memprof.planners.scaling.curves import along, fit, growing
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step
from tests.planners.sizes import error, peak_bytes, record, record_job, scale_between, train_attention, train_images


@cache
def recorded(job: str, size: int) -> Step:
    """A step of a job at a size; each is recorded once."""
    jobs: dict[str, Callable[[], Step]] = {
        "images": lambda: record(partial(train_images, size)),
        "attention": lambda: record(partial(train_attention, size)),
        "lstm": lambda: record_job("lstm", size),
        "shared": lambda: record_job("shared", size),
    }
    return jobs[job]()


@pytest.mark.parametrize(
    ("job", "known", "asked"),
    [
        ("images", (4, 8), (12, 16)),
        ("shared", (4, 8), (12, 16)),
        ("lstm", (4, 8), (12,)),
        ("attention", (16, 32), (48, 96)),
    ],
)
def test_two_recordings_tell_the_peak_of_a_third(
    job: str, known: tuple[int, int], asked: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Learned from a job at two batches (or lengths), the peak at a larger one is within 1 % of the measured one."""
    sized = scale_between({size: recorded(job, size) for size in known})
    errors = {size: error(sized, size, recorded(job, size)) for size in asked}
    with capsys.disabled():
        print(f" {job} " + ", ".join(f"{size}: {each:+.4%}" for size, each in errors.items()), end=" ")
    assert all(abs(each) <= 0.01 for each in errors.values())
    assert sized.source == "modelled"


@pytest.mark.parametrize("job", ["images", "shared"])
def test_plain_jobs_are_predicted_to_the_byte(job: str) -> None:
    """Where no kernel takes memory by rules of its own, the predicted peak at three times the batch is exact."""
    sized = scale_between({size: recorded(job, size) for size in (4, 8)})
    assert peak_bytes(sized.step_at(12)) == peak_bytes(recorded(job, 12))


def test_squares_grow_with_the_square() -> None:
    """Attention's scores, of two dimensions that are the length, are exact at six times the length."""
    sized = scale_between({size: recorded("attention", size) for size in (16, 32)})
    predicted, measured = sized.step_at(96), recorded("attention", 96)
    squares = [storages[storages == "2x2x96x96"] for storages in (predicted.storages.shape, measured.storages.shape)]
    assert len(squares[0]) == len(squares[1]) > 0
    of_scores = predicted.storages.shape == "2x2x96x96"
    assert set(predicted.storages.requested_bytes[of_scores].tolist()) == {2 * 2 * 96 * 96 * 4}


def test_recorded_sizes_come_back() -> None:
    """At a size that was recorded, every storage and every operator's workspace is as recorded."""
    sized = scale_between({size: recorded("shared", size) for size in (4, 8)})
    step, measured = sized.step_at(8), recorded("shared", 8)
    assert np.array_equal(step.storages.requested_bytes, measured.storages.requested_bytes)
    assert np.array_equal(step.storages.allocated_bytes, measured.storages.allocated_bytes)
    assert np.array_equal(step.storages.shape, measured.storages.shape)
    assert np.array_equal(step.ops.workspace_bytes, measured.ops.workspace_bytes)
    assert peak_bytes(sized.step_at(4)) == peak_bytes(recorded("shared", 4))


def test_parameters_do_not_grow() -> None:
    """What belongs to the model has the same bytes at every batch."""
    sized = scale_between({size: recorded("shared", size) for size in (4, 8)})
    for category in ("parameter", "buffer", "gradient", "optimizer_state"):
        sums = {
            int(step.storages.allocated_bytes[step.storages.category == category].sum())
            for step in (recorded("shared", 4), sized.step_at(1), sized.step_at(1000))
        }
        assert len(sums) == 1


def test_peak_and_time_never_fall_as_the_batch_grows() -> None:
    """A larger batch takes no less memory and no less time, so that a search may halve its way to the largest."""
    sized = scale_between({size: recorded("shared", size) for size in (4, 8)})
    steps = [sized.step_at(size) for size in (1, 2, 3, 5, 8, 13, 40, 200, 5000)]
    peaks, times = [peak_bytes(step) for step in steps], [step.duration_us for step in steps]
    assert peaks == sorted(peaks)
    assert times == sorted(times)


def test_third_recording_is_used() -> None:
    """Three recordings agree with each of them, and with what two of them say where everything is proportional."""
    three = scale_between({size: recorded("shared", size) for size in (4, 8, 12)})
    assert three.sizes == (4, 8, 12)
    assert [peak_bytes(three.step_at(size)) for size in three.sizes] == [
        peak_bytes(recorded("shared", size)) for size in three.sizes
    ]
    assert peak_bytes(three.step_at(16)) == peak_bytes(recorded("shared", 16))


def test_one_recording_is_a_rule() -> None:
    """From one recording alone, the dimension that the inputs begin with is the batch; the answer is labelled."""
    sized = scale_by_shape(recorded("shared", 8))
    assert (sized.sizes, sized.source) == ((8,), "rule")
    for size in (4, 12, 16):
        assert abs(error(sized, size, recorded("shared", size))) <= 0.01


def test_one_recording_without_a_batch_says_so() -> None:
    """A step without inputs shows no batch: the answer is to record a second one, with exit code 3."""
    step = step_from_arrays(time_us=[1.0], output_bytes=[4], inputs=[[]], is_backward=[False])
    with pytest.raises(
        InconclusiveError, match=r"cannot determine the batch size from this recording .*: record a second one"
    ) as caught:
        scale_by_shape(step)
    assert caught.value.exit_code == 3


def test_other_operators_are_one_clear_sentence() -> None:
    """Recordings of different models or loops are refused, and the sentence says where they part."""
    other = record(partial(train_images, 8, twice=True))
    with pytest.raises(InconclusiveError, match=r"do not run the same operators.*size 4 runs aten.*and size 8"):
        scale_between({4: recorded("images", 4), 8: other})


def test_too_few_sizes_are_refused() -> None:
    """One recording does not determine a line, and sizes begin at 1."""
    step = recorded("images", 4)
    with pytest.raises(UsageError, match="two recordings at different sizes"):
        scale_between({4: step})
    with pytest.raises(UsageError, match="invalid size 0"):
        scale_between({0: step, 4: step})
    with pytest.raises(UsageError, match="invalid size 0"):
        scale_between({4: step, 8: recorded("images", 8)}).step_at(0)


def test_cuda_rounds_to_512_bytes() -> None:
    """On CUDA a scaled storage takes a multiple of 512 bytes; on the CPU what it asks for."""

    def made(size: int, device: str) -> Step:
        step = step_from_arrays(
            time_us=[1.0, 1.0], output_bytes=[100 * size, 100 * size], inputs=[[], [0]], is_backward=[False, False]
        )
        requested = step.storages.requested_bytes
        allocated = -(-requested // 512) * 512 if device != "cpu" else requested
        storages = step.storages.replace(
            device=np.full(len(requested), device, dtype=np.object_), allocated_bytes=allocated
        )
        return dataclasses.replace(step, storages=storages)

    for device, bytes_ in (("cuda:0", 1024), ("cpu", 700)):
        sized = scale_between({2: made(2, device), 4: made(4, device)})
        storages = sized.step_at(7).storages
        is_made = storages.created_op_id != NONE
        assert set(storages.requested_bytes[is_made].tolist()) == {700}
        assert set(storages.allocated_bytes[is_made].tolist()) == {bytes_}


def test_lines_and_parabolas() -> None:
    """Two points are a line; three are a line or a parabola where they are on one, and else a guess with a bound."""
    sizes = np.array([2.0, 4.0, 6.0])
    columns = np.array([[4.0, 7.0, 9.0], [16.0, 9.0, 9.0], [36.0, 11.0, 12.0]])  # x^2; 5 + x; a step at 4
    three = fit(sizes, columns, columns, 10.0, may_be_square=True)
    assert three.is_sure.tolist() == [True, True, False]
    assert np.allclose(three.likely[:2], [100.0, 15.0])
    assert three.most[2] >= three.likely[2] >= 12.0
    assert fit(sizes, columns, columns, 4.0, may_be_square=True).likely.tolist() == [16.0, 9.0, 9.0]
    two = fit(sizes[:2], columns[:2], columns[:2], 10.0, may_be_square=True)
    assert two.likely.tolist() == [52.0, 15.0, 9.0]
    assert np.allclose(two.most, [100.0, 7 + 2 * 96 / 12, 9.0])  # the square that it may be
    assert two.is_sure.tolist() == [False, False, True]
    assert fit(sizes[:2], columns[:2], columns[:2], 10.0, may_be_square=False).is_sure.all()
    points = np.repeat(sizes[:, None], 3, axis=1)
    assert along(points, columns, np.full(3, 3.0)).tolist() == [10.0, 8.0, 9.0]
    assert along(points, columns, np.full(3, 8.0)).tolist() == [56.0, 13.0, 15.0]


def test_times_are_smoothed_not_believed() -> None:
    """Noise makes no operator faster at a larger batch, none takes less than nothing, and unknown stays unknown."""
    points = np.array([[4.0] * 4, [8.0] * 4])
    times = np.array([[10.0, 30.0, 2.0, np.nan], [20.0, 25.0, 10.0, 5.0]])
    larger = growing(points, times, np.full(4, 16.0))
    assert larger[:3].tolist() == [40.0, 30.0, 20.0]
    assert np.isnan(larger[3])
    smaller = growing(points, times, np.full(4, 1.0))
    assert (smaller[:3] >= 0).all()
    assert (smaller[:3] <= larger[:3]).all()


def test_batch_in_the_second_dimension() -> None:
    """A job that puts time first, as an LSTM's does, has its batch in the second: everything computed has it there."""
    storages = (
        Storage("words", 35 * 10 * 8, "input", shape="35x10", dtype="int64"),
        Storage("state", 2 * 10 * 6 * 4, shape="2x10x6"),
        Storage("hidden", 35 * 10 * 6 * 4, shape="35x10x6"),
        Storage("last", 10 * 6 * 4, shape="10x6"),
    )
    step = make_step(
        (
            Op("aten.embedding.default", reads=("words",), makes=("hidden",)),
            Op("aten.lstm.default", reads=("hidden",), makes=("state",)),
            Op("aten.select.int", reads=("state",), makes=("last",)),
        ),
        storages,
    )
    sized = scale_by_shape(step)
    assert sized.sizes == (10,)
    at = sized.step_at(20)
    assert dict(zip(at.storages.shape.tolist(), at.storages.requested_bytes.tolist(), strict=True)) == {
        "35x20": 35 * 20 * 8,
        "2x20x6": 2 * 20 * 6 * 4,
        "35x20x6": 35 * 20 * 6 * 4,
        "20x6": 20 * 6 * 4,
    }


def test_a_width_that_is_also_the_length_is_not_the_batch() -> None:
    """Attention over 64 tokens of 64 features holds as many sizes of 64 as of the batch: parameters have a width."""
    storages = (
        Storage("tokens", 4 * 64 * 8, "input", shape="4x64", dtype="int64"),
        Storage("table", 100 * 64 * 4, "parameter", shape="100x64"),
        Storage("weight", 64 * 256 * 4, "parameter", shape="64x256"),
        Storage("hidden", 4 * 64 * 64 * 4, shape="4x64x64"),
        Storage("mask", 64 * 64 * 4, shape="64x64"),
        Storage("wide", 4 * 64 * 256 * 4, shape="256x256"),
    )
    ops = (
        Op("aten.embedding.default", reads=("tokens", "table"), makes=("hidden",)),
        Op("aten.tril.default", reads=("hidden",), makes=("mask",)),
        Op("aten.mm.default", reads=("hidden", "mask", "weight"), makes=("wide",)),
    )
    assert scale_by_shape(make_step(ops, storages)).sizes == (4,)


def test_a_batch_that_is_loaded_after_an_evaluation_is_found() -> None:
    """An evaluation with gradients begins what looks like forward; the training batch is loaded inside it."""
    storages = (
        Storage("held out", 10 * 3 * 32 * 4, "input", shape="10x3x32"),
        Storage("mean", 3 * 4, "input", shape="3"),
        Storage("weight", 3 * 3 * 4, "parameter", shape="3x3"),
        Storage("judged", 10 * 3 * 32 * 4, shape="10x3x32"),
        Storage("batch", 4 * 3 * 32 * 4, shape="4x3x32"),
        Storage("first", 4 * 3 * 32 * 4, shape="4x3x32"),
        Storage("second", 4 * 3 * 16 * 4, shape="4x3x16"),
    )
    ops = (
        Op(reads=("held out", "weight"), makes=("judged",), module="net"),
        Op("aten.stack.default", reads=("mean",), makes=("batch",)),
        Op(reads=("batch", "weight"), makes=("first",), module="net"),
        Op(reads=("first", "weight"), makes=("second",), module="net"),
    )
    assert scale_by_shape(make_step(ops, storages, (Module(""), Module("net")))).sizes == (4,)


def test_batch_that_stays_from_step_to_step_grows_too() -> None:
    """A job that trains on one batch for ever made it before the step; it is as large as the batch all the same."""
    storages = (Storage("x", 8 * 4, "input", shape="8x1"), Storage("y", 8 * 4, shape="8x1"))
    step = make_step((Op(reads=("x",), makes=("y",)),), storages)
    assert peak_bytes(scale_by_shape(step).step_at(16)) == 2 * peak_bytes(step)
