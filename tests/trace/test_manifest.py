"""The manifest of a trace."""

from __future__ import annotations

import json

import pytest

from memprof.trace.manifest import Backend, Capture, Machine, Manifest, Window, number_ranks

FULL = Manifest(
    memprof_version="1.2",
    torch_version="2.13.0",
    python_version="3.11.7",
    created_us=1.5e15,
    command=("python", "train.py", "--lr", "0.1"),
    target="train.py",
    machine=Machine(device_name="H100", device_kind="cuda", cores=8, memory_bytes=2**40, capacity_bytes=80 * 2**30),
    rank=3,
    world_size=8,
    pid=77,
    plan={"policies": [{"name": "recompute"}]},
    backend=Backend(name="cpu-native", sees=("allocations",), blind_spots=("pinned memory", "other libraries")),
    capture=Capture(is_complete=False, ends_at="step 3, backward", reason="killed", exit_status=-9),
    window=Window(skip=1, steps=5, stop=True),
    op_times="timed step 5",
    notes=("one", "two"),
    same_ranks=(0, 7),
)


def test_manifest_survives_json() -> None:
    """A manifest written as JSON comes back equal, tuples and None included."""
    assert Manifest.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL
    assert Manifest.from_json(json.loads(json.dumps(Manifest().to_json()))) == Manifest()


def test_unknown_keys_are_ignored_and_missing_ones_defaulted() -> None:
    """A manifest of another version within the schema is read, as one with what older versions read off the source."""
    record = {"rank": 2, "created_us": 5, "own_casts": [0, 7], "machine": {"cores": 4, "colour": "blue"}}
    assert Manifest.from_json(record) == Manifest(rank=2, created_us=5.0, machine=Machine(cores=4))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"rank": "one"}, "'rank' holds no int"),
        ({"rank": True}, "'rank' holds no int"),
        ({"command": "python train.py"}, "'command' holds no tuple"),
        ({"command": [1]}, "'command' holds no tuple"),
        ({"machine": []}, "'machine' holds no Machine"),
        ({"machine": {"cores": None}}, "'cores' holds no int"),
        ({"plan": 3}, "'plan' holds no dict"),
        ({"plan": {"policies": [float("inf")]}}, "'plan' holds a number that is not finite"),
        ({"same_ranks": ["1"]}, "'same_ranks' holds no tuple"),
        ({"capture": {"exit_status": "9"}}, "'exit_status' holds no int"),
        ({"created_us": "now"}, "'created_us' holds no float"),
    ],
)
def test_values_of_another_type_are_refused(record: dict[str, object], sentence: str) -> None:
    """A value of the wrong type is named."""
    with pytest.raises(TypeError, match=sentence):
        Manifest.from_json(record)


def test_ranks_that_differ_stay() -> None:
    """Ranks 2 and 5 of a larger job keep their numbers and say nothing."""
    manifests = [Manifest(rank=5), Manifest(rank=2)]
    assert number_ranks(manifests) == manifests


def test_equal_ranks_are_numbered_in_order() -> None:
    """Two processes that are both rank 0 become 0 and 1, and the second one's notes say so."""
    first, second = number_ranks([Manifest(pid=10), Manifest(pid=20)])
    assert (first.rank, second.rank) == (0, 1)
    assert first.notes == ()
    assert second.notes == ("Several processes were recorded as rank 0; process 20 is 1 here.",)
