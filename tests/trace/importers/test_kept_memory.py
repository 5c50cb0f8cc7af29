"""What a history shows as always in use: parameters, optimizer state or data, by sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.importers.importing import import_file
from memprof.trace.importers.kept_memory import count_states, data_sizes
from memprof.trace.schema import Ops, Storages
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import (
    BACKWARD,
    FORWARD,
    MIB,
    OPTIMIZER,
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


CUBLAS, LIKE_HOPPERS = 8_519_680, 32 * MIB
HANDLE = frame("??:0", "at::cuda::getCurrentCUDABlasHandle()")
ALLOCATES = frame("CUDACachingAllocator.cpp:0", "c10::cuda::CUDACachingAllocator::Native::malloc(void**)")


def _operator(name: str) -> dict[str, object]:
    return frame("??:0", f"at::_ops::{name}::call(at::Tensor const&)")


@pytest.mark.parametrize(
    ("size", "count", "native", "is_workspace"),
    [
        pytest.param(LIKE_HOPPERS, 1, [_operator("exp")], False, id="another operator"),
        pytest.param(LIKE_HOPPERS, 1, [ALLOCATES, _operator("mm")], False, id="a product's result"),
        pytest.param(3 * MIB, 1, [ALLOCATES, HANDLE, _operator("mm")], True, id="a handle's, of any size"),
        pytest.param(LIKE_HOPPERS, 1, [_operator("mm")], True, id="by size, where the frames do not say"),
        pytest.param(LIKE_HOPPERS, 3, [], False, id="too many"),
        pytest.param(LIKE_HOPPERS, 2, [], False, id="several of one stack"),
        pytest.param(LIKE_HOPPERS, 1, [], False, id="one of a stack that makes nothing else"),
        pytest.param(CUBLAS, 2, [], True, id="few of a size that tensors hardly have"),
        pytest.param(CUBLAS, 3, [], False, id="too many of one stack, whatever their size"),
    ],
)
def test_a_workspace_of_cublas_is_known_by_its_stack(
    size: int, count: int, native: list[dict[str, object]], is_workspace: bool, tmp_path: Path
) -> None:
    """A tensor that is as large as a workspace is none where the stack, or the number of them, contradicts that."""
    places = [LIKE_HOPPERS * number for number in range(1, count + 1)]
    at = [segment(0, block(MIB)), *(segment(place, block(size)) for place in places)]
    history = [entry("alloc", 0, MIB, TRAIN), *(entry("alloc", place, size, [*native, *FORWARD]) for place in places)]
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", snapshot(at, history))).ranks
    assert (tables[Storages].category == "workspace").tolist() == [False, *[is_workspace] * count]


def test_python_alone_shows_a_workspace_by_its_products_result(tmp_path: Path) -> None:
    """Without C++ frames, 32 MiB that stay are cuBLAS's if their line made a product's result next to them."""
    places = [LIKE_HOPPERS, 2 * LIKE_HOPPERS]
    history = [entry("alloc", places[0], MIB, FORWARD), entry("alloc", places[1], LIKE_HOPPERS, FORWARD)]
    at = [segment(places[0], block(MIB)), segment(places[1], block(LIKE_HOPPERS))]
    content = snapshot(at, [entry("alloc", 0, 512, TRAIN), *freed(0, 512), *history])
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", content)).ranks
    assert tables[Storages].category.tolist()[-2:] == ["activation", "workspace"]


def test_size_alone_makes_no_workspace(tmp_path: Path) -> None:
    """32 MiB that stay are a tensor where no stack was taken, and in a model's weights from before its inference."""
    history = [entry("alloc", LIKE_HOPPERS, LIKE_HOPPERS), entry("alloc", 0, MIB)]
    content = snapshot([segment(0, block(MIB)), segment(LIKE_HOPPERS, block(LIKE_HOPPERS))], history)
    ((_, tables),) = import_file(write(tmp_path / "bare.pickle", content)).ranks
    assert set(tables[Storages].category.tolist()) == {"unknown"}
    weights = [segment(place * LIKE_HOPPERS, block(LIKE_HOPPERS)) for place in (1, 2)]
    history = [entry("alloc", 0, MIB, FORWARD), *freed(0, MIB)]
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", snapshot(weights, history))).ranks
    assert sorted(tables[Storages].category.tolist()) == ["parameter", "parameter", "temporary"]


def test_old_tensors_as_large_as_a_workspace_are_parameters(tmp_path: Path) -> None:
    """Of five tensors of 32 MiB older than the history, two have gradients: one is left, which cuBLAS may have."""
    kept = [segment(place * LIKE_HOPPERS, block(LIKE_HOPPERS)) for place in range(5)]
    gradients = range(5 * LIKE_HOPPERS, 7 * LIKE_HOPPERS, LIKE_HOPPERS)
    history = [entry("alloc", 8 * LIKE_HOPPERS, MIB, FORWARD)]
    history += [entry("alloc", address, LIKE_HOPPERS, BACKWARD) for address in gradients]
    history += [*freed(8 * LIKE_HOPPERS, MIB), entry("alloc", 9 * LIKE_HOPPERS, 512, OPTIMIZER)]
    history += [one for address in gradients for one in freed(address, LIKE_HOPPERS, frames=TRAIN)]
    end = segment(9 * LIKE_HOPPERS, block(512))
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", snapshot([*kept, end], history))).ranks
    storages = tables[Storages]
    old = storages.category[(storages.requested_bytes == LIKE_HOPPERS) & (storages.created_op_id < 0)]
    assert sorted(old.tolist()) == ["optimizer_state"] * 2 + ["parameter"] * 2 + ["workspace"]


def test_a_result_that_is_dropped_at_once_is_no_workspace(tmp_path: Path) -> None:
    """A result of forward that is freed before anything else is allocated is not what a kernel works in beside one."""
    line = [frame("/job/model.py:8", "forward"), *FORWARD[1:]]
    history = [
        entry("alloc", 0, MIB, FORWARD),
        entry("alloc", MIB, 2 * MIB, FORWARD),
        *freed(MIB, 2 * MIB),
        entry("alloc", 4 * MIB, 4 * MIB, line),
        *freed(4 * MIB, 4 * MIB),
    ]
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", snapshot([segment(0, block(MIB))], history))).ranks
    storages = tables[Storages]
    found = dict(zip((storages.requested_bytes // MIB).tolist(), storages.category.tolist(), strict=True))
    assert (found[2], found[4]) == ("workspace", "temporary")


@pytest.mark.parametrize("is_state", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_weights_that_an_update_replaces_stay_parameters(is_state: bool, updates: int, tmp_path: Path) -> None:
    """``p.data = p.data - lr * p.grad``: the new tensor is a parameter, and so is the old one, from before the history.

    If another tensor of 4 MiB is never freed, that one is the weight, and the update replaces its momentum.
    """
    size, places = 4 * MIB, iter(range(0, 1 << 40, 8 * MIB))
    weight, gradient, kept = next(places), next(places), next(places)
    update = [*OPTIMIZER[1:]]
    history = []
    for _ in range(updates):
        saved, product, new = next(places), next(places), next(places)
        history += [entry("alloc", saved, MIB, FORWARD), entry("alloc", gradient, size, BACKWARD)]
        history += [*freed(saved, MIB), entry("alloc", product, size, update), entry("alloc", new, size, update)]
        history += [*freed(weight, size), *freed(product, size), *freed(gradient, size)]
        weight = new
    at_end = [segment(weight, block(size)), *([segment(kept, block(size))] if is_state else [])]
    ((_, tables),) = import_file(write(tmp_path / "s.pickle", snapshot(at_end, history))).ranks
    storages = tables[Storages]
    found = storages.category[(storages.requested_bytes == size)].tolist()
    replaced = "optimizer_state" if is_state else "parameter"
    assert found.count(replaced) == 1 + updates
    assert found.count("parameter") == (1 if is_state else 1 + updates)
    assert found.count("temporary") == found.count("gradient") == updates
