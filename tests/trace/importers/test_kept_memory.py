"""What a history shows as always in use: parameters, optimizer state or data, by sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.importers import import_file
from memprof.trace.importers.purposes.kept_memory import count_states, data_sizes
from memprof.trace.schema import Ops, Storages
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import (
    BACKWARD,
    FORWARD,
    MIB,
    TRAIN,
    block,
    entry,
    frame,
    freed,
    segment,
    snapshot,
    write,
)

KIB = 1024


@pytest.mark.parametrize(
    ("kept", "gradients", "updated", "expected"),
    [
        pytest.param({8 * KIB: 6, 4 * KIB: 3}, {8 * KIB: 2, 4 * KIB: 1}, {}, {8 * KIB: 4, 4 * KIB: 2}, id="adam"),
        pytest.param({8 * KIB: 8, 4 * KIB: 3}, {8 * KIB: 2, 4 * KIB: 1}, {}, {8 * KIB: 4, 4 * KIB: 2}, id="frozen"),
        pytest.param({8 * KIB: 3, 4: 1}, {8 * KIB: 1}, {}, {8 * KIB: 2, 4: 1}, id="counts of updates"),
        # Gradients in bf16, of which the optimizer updates copies in float32.
        pytest.param(
            {4 * KIB: 2, 8 * KIB: 6}, {4 * KIB: 2}, {8 * KIB: 2}, {4 * KIB: 0, 8 * KIB: 4}, id="longer copies"
        ),
        pytest.param(
            {4 * KIB: 2, 8 * KIB: 6}, {4 * KIB: 2}, {8 * KIB: 1}, {4 * KIB: 0, 8 * KIB: 0}, id="one at a time"
        ),
        # Gradients of all parameters are one tensor, padded.
        pytest.param({8 * KIB: 6, 4 * KIB: 3}, {20 * KIB + 512: 1}, {}, {8 * KIB: 4, 4 * KIB: 2}, id="sharded"),
        pytest.param({8 * KIB: 6, 4 * KIB: 4}, {20 * KIB: 1}, {}, {8 * KIB: 0, 4 * KIB: 0}, id="no multiple"),
        pytest.param({8 * KIB: 6}, {}, {}, {8 * KIB: 0}, id="inference"),
    ],
)
def test_states_are_counted(
    kept: dict[int, int], gradients: dict[int, int], updated: dict[int, int], expected: dict[int, int]
) -> None:
    """By gradients of their size, by what an update allocates, or by the sum of the gradients."""
    assert count_states(kept, gradients, updated) == expected


def test_a_few_tensors_of_their_own_sizes_are_data() -> None:
    """A replay buffer next to a trained model; not the many tensors of frozen layers, nor where nothing is trained."""
    trained, buffer = {8 * KIB: 3}, {MIB: 2, 4 * KIB: 1, 64: 1}
    assert data_sizes(trained | buffer, {8 * KIB: 1}, {8 * KIB: 2}) == set(buffer)
    assert not data_sizes(trained | {MIB: 12, 512 * KIB: 12}, {8 * KIB: 1}, {8 * KIB: 2})
    assert not data_sizes(trained | {MIB: 3}, {8 * KIB: 1}, {8 * KIB: 2})
    assert not data_sizes(trained | buffer, {}, {})


class Job:
    """Writes a history of allocations that are named by the order in which they are made."""

    def __init__(self) -> None:
        self.history: list[object] = []
        self.sizes: list[int] = []
        self.gone: set[int] = set()

    def alloc(self, size: int, frames: object, *, is_older: bool = False) -> int:
        """Allocates; what is older than the history is in the end state alone."""
        self.sizes.append(size)
        number = len(self.sizes) - 1
        if not is_older:
            self.history.append(entry("alloc", number << 30, size, frames))
        return number

    def free(self, *numbers: int) -> None:
        """Frees allocations."""
        for number in numbers:
            self.gone.add(number)
            self.history += freed(number << 30, self.sizes[number])

    def categories(self, folder: Path) -> list[str]:
        """Imports the snapshot, and returns the categories, those older than the history first."""
        left = [segment(at << 30, block(size)) for at, size in enumerate(self.sizes) if at not in self.gone]
        path = write(folder / "s.pickle", snapshot(left, self.history))
        write_trace(folder / "s.memprof", import_file(path).ranks)
        return [str(one) for one in Trace.open(folder / "s.memprof").table(Storages).category]


def test_gradients_of_micro_batches_are_counted_where_each_backward_ends(tmp_path: Path) -> None:
    """While a gradient is added to another, there are two; the weight has one, and so one state with SGD's momentum."""
    job = Job()
    for _ in range(2):
        job.alloc(MIB, None, is_older=True)
    job.free(job.alloc(4 * MIB, FORWARD))
    kept = job.alloc(MIB, BACKWARD)
    job.alloc(2 * MIB, TRAIN)
    job.free(job.alloc(4 * MIB, FORWARD))
    other = job.alloc(MIB, BACKWARD)
    job.alloc(512, BACKWARD)
    job.free(other)
    job.alloc(512, TRAIN)
    job.free(kept)
    assert job.categories(tmp_path)[:2] == ["parameter", "optimizer_state"]


def test_gradients_of_activations_are_not_taken_for_those_of_weights_where_memory_runs_out(tmp_path: Path) -> None:
    """Of what backward has made when it fails, a weight's size tells its gradient."""
    job = Job()
    job.alloc(3 * MIB, None, is_older=True)
    for size, frames in ((7 * MIB, FORWARD), (7 * MIB, BACKWARD), (3 * MIB, BACKWARD)):
        job.alloc(size, frames)
    job.history.append({"action": "oom", "device_free": 0, "size": MIB, "stream": 0, "frames": BACKWARD})
    assert job.categories(tmp_path) == ["parameter", "activation", "temporary", "gradient"]


def test_a_stack_that_begins_in_torch_is_one_of_backward(tmp_path: Path) -> None:
    """Where stacks have Python frames alone, a hook's, or those of a layer that is computed again."""
    hook = [
        frame("/job/model.py:3", "forward"),
        frame("/env/site-packages/torch/nn/modules/module.py:1789", "_call_impl"),
        frame("/env/site-packages/torch/utils/checkpoint.py:1200", "unpack_hook"),
    ]
    job = Job()
    job.alloc(2 * MIB, [*FORWARD, frame("/job/train.py:1", "<module>")])
    job.alloc(4 * MIB, hook)
    job.categories(tmp_path)
    assert Trace.open(tmp_path / "s.memprof").table(Ops).phase.tolist() == ["other", "forward", "backward"]


def test_what_the_end_cuts_off_is_what_its_line_made_before(tmp_path: Path) -> None:
    """A batch that is still there when the history ends is input, as the ones before it were."""
    job = Job()
    batch = [frame("/job/train.py:7", "<module>")]
    for _ in range(2):
        given = job.alloc(MIB, batch)
        job.free(job.alloc(MIB, FORWARD))
        job.alloc(512, BACKWARD)
        job.free(given)
    job.alloc(MIB, batch)
    assert job.categories(tmp_path)[-1] == "input"


def test_a_model_that_is_loaded_after_another_one_has_run_is_not_data(tmp_path: Path) -> None:
    """A module's own code moves its parameters; what the job makes there by itself, and a forward finds, is input."""
    script = frame("/job/train.py:9", "<module>")
    moved = [frame("/env/site-packages/torch/nn/modules/module.py:1371", "convert"), script]
    job = Job()
    job.free(job.alloc(2 * MIB, FORWARD))
    job.alloc(3 * MIB, moved)
    job.alloc(MIB, [script])
    job.free(job.alloc(2 * MIB, FORWARD))
    assert job.categories(tmp_path)[1:3] == ["parameter", "input"]
