"""Categories of storages."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest

from memprof.trace.assemble.memory.categories import Facts, Lifetimes, categorize
from memprof.trace.files.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER
from memprof.trace.schema import NONE, Ops, Uses

#: The operators of every test here: two of each phase, and two that repeat forward inside backward.
PHASES = ["other", "other", "forward", "forward", "backward", "backward", "optimizer", "optimizer"]
PHASES += ["backward", "backward"]
DATA, _, FORWARD, NEXT_FORWARD, BACKWARD, _, UPDATE, NEXT_UPDATE, REPEAT, NEXT_REPEAT = range(10)


@dataclass(frozen=True)
class Made:
    """A storage: the operator that makes it (None: older), those that read it, what was stated, and its family."""

    by: int | None = None
    read: tuple[int, ...] = ()
    stated: tuple[int, ...] = ()
    family: int = 0


def categories(*storages: Made) -> list[str]:
    uses = [(op, number) for number, storage in enumerate(storages) for op in storage.read]
    facts = [(number, code, s.family) for number, s in enumerate(storages) for code in s.stated]
    use_op, use_storage = np.array(uses, dtype=np.int64).reshape(-1, 2).T
    storage, code, family = np.array(facts, dtype=np.int64).reshape(-1, 3).T
    none = np.full(len(facts), NONE)
    lifetimes = Lifetimes.of(
        np.array([NONE if s.by is None else s.by for s in storages], dtype=np.int64),
        np.full(len(storages), NONE),
        Uses.of(op_id=use_op, storage_id=use_storage, role=["read"] * len(uses)),
        Ops.of(
            op_id=range(len(PHASES)),
            phase=PHASES,
            is_recompute=[number >= REPEAT for number in range(len(PHASES))],
        ),
    )
    return list(categorize(Facts(storage, code, none, none, none, family), lifetimes))


@pytest.mark.parametrize(
    ("code", "category"),
    [
        (PARAMETER, "parameter"),
        (BUFFER, "buffer"),
        (OPTIMIZER_STATE, "optimizer_state"),
        (GRADIENT, "gradient"),
    ],
)
def test_what_is_stated_settles_the_category(code: int, category: str) -> None:
    """A stated purpose holds whoever made the storage and whoever reads it."""
    made = [Made(read=(FORWARD,)), Made(by=FORWARD, read=(BACKWARD,)), Made(by=BACKWARD), Made(by=UPDATE)]
    stated = [Made(storage.by, storage.read, (HELD, INPUT, code)) for storage in made]
    assert categories(*stated) == [category] * 4


def test_the_first_of_several_statements_wins() -> None:
    """Parameter before buffer before optimizer state before gradient: averaged weights are a model's parameters too."""
    assert categories(
        Made(stated=(GRADIENT, OPTIMIZER_STATE, BUFFER, PARAMETER)),
        Made(stated=(GRADIENT, OPTIMIZER_STATE, BUFFER)),
        Made(stated=(GRADIENT, OPTIMIZER_STATE)),
    ) == ["parameter", "buffer", "optimizer_state"]


def test_made_in_forward_and_read_in_backward_is_an_activation() -> None:
    """What forward makes only for forward is temporary."""
    assert categories(Made(FORWARD, (BACKWARD,)), Made(FORWARD, (NEXT_FORWARD,)), Made(FORWARD)) == [
        "activation",
        "temporary",
        "temporary",
    ]


def test_made_in_backward_or_by_an_optimizer_is_temporary() -> None:
    """Until something is stated of it, as of gradients."""
    assert categories(Made(BACKWARD, (BACKWARD + 1, UPDATE)), Made(UPDATE, (NEXT_UPDATE,))) == ["temporary"] * 2


def test_made_again_for_backward_is_an_activation() -> None:
    """A checkpoint's recomputation makes activations where a backward node reads them, else temporaries."""
    assert categories(Made(REPEAT, (NEXT_REPEAT, BACKWARD)), Made(REPEAT, (NEXT_REPEAT,))) == [
        "activation",
        "temporary",
    ]


def test_a_checkpoints_input_is_an_activation() -> None:
    """What forward made and the recomputation reads was kept for backward."""
    assert categories(Made(FORWARD, (NEXT_FORWARD, REPEAT))) == ["activation"]


def test_older_memory_read_in_forward_is_input() -> None:
    """Batches made before the recording, read in forward or while a batch is prepared, also if backward reads them."""
    assert categories(Made(read=(FORWARD,)), Made(read=(FORWARD, BACKWARD)), Made(read=(DATA,))) == ["input"] * 3


def test_older_memory_read_first_in_backward_is_an_activation() -> None:
    """The recording began between forward and backward."""
    assert categories(Made(read=(BACKWARD,)), Made(stated=(ACTIVATION,))) == ["activation"] * 2


def test_older_memory_that_nobody_explains_is_unknown() -> None:
    """Held and not read, or read by an optimizer only."""
    assert categories(Made(stated=(HELD,)), Made(), Made(read=(UPDATE,))) == ["unknown"] * 3


def test_made_outside_the_phases_and_read_in_forward_is_input() -> None:
    """A batch is prepared outside the model; what only prepares it is temporary."""
    assert categories(Made(DATA, (FORWARD, BACKWARD)), Made(DATA, (DATA + 1,))) == ["input", "temporary"]


def test_what_a_model_is_called_with_is_input() -> None:
    """Even where no operator of forward reads it itself; what forward made is not (a model called by a model)."""
    assert categories(Made(DATA, stated=(INPUT,)), Made(stated=(INPUT,)), Made(FORWARD, (BACKWARD,), (INPUT,))) == [
        "input",
        "input",
        "activation",
    ]


def test_what_looks_like_the_batches_is_input() -> None:
    """The data set and batches not used yet are held, of a batch's type and sizes but for the first; others are not."""
    assert categories(
        Made(read=(FORWARD,), stated=(HELD,), family=3),
        Made(stated=(HELD,), family=3),
        Made(stated=(HELD,), family=4),
        Made(DATA, stated=(HELD,), family=3),
    ) == ["input", "input", "unknown", "temporary"]


def test_what_looks_like_a_parameter_is_no_input() -> None:
    """A copy of the weights, held and not touched, is unknown, although forward reads the weights themselves."""
    assert categories(Made(read=(FORWARD,), stated=(HELD, PARAMETER), family=3), Made(stated=(HELD,), family=3)) == [
        "parameter",
        "unknown",
    ]


def test_buffers_of_collectives_are_told_from_activations_that_are_summed_over_ranks() -> None:
    """A buffer is empty at first, or older than the step; what an operator computed keeps its category.

    Forward: empty makes 0, which is gathered and copied into 1 (resized outside of operators); mm makes 2, which is
    summed over ranks in place. Backward reads 1 and 2, and sums 3, which is older: a bucket. mm makes the gradient 4,
    copied into 5 to be scattered.
    """
    names = ["aten.empty.memory_format", "c10d._allgather_base_.default", "fsdp.split_with_sizes_copy.default"]
    names += ["aten.mm.default", "c10d.allreduce_.default", "aten.mm.default", "c10d.allreduce_.default"]
    names += [
        "aten.mm.default",
        "aten.empty.memory_format",
        "fsdp.chunk_cat.default",
        "c10d._reduce_scatter_base_.default",
    ]
    ops = Ops.of(
        op_id=range(len(names)),
        name=names,
        phase=["forward"] * 5 + ["backward"] * 6,
        kind=["collective" if name.startswith("c10d") else "compute" for name in names],
    )
    uses = [(0, 0, "write"), (1, 0, "mutate"), (2, 0, "read"), (2, 1, "mutate"), (3, 1, "read"), (3, 2, "write")]
    uses += [(4, 2, "mutate"), (5, 1, "read"), (5, 2, "read"), (6, 3, "mutate"), (7, 4, "write"), (8, 5, "write")]
    uses += [(9, 4, "read"), (9, 5, "mutate"), (10, 5, "read")]
    op, storage, role = zip(*uses, strict=True)
    uses_table = Uses.of(op_id=op, storage_id=storage, role=role)
    lifetimes = Lifetimes.of(np.array([0, 1, 3, NONE, 7, 8]), np.full(6, NONE), uses_table, ops)
    nothing = np.empty(0, dtype=np.int64)
    found = categorize(Facts(nothing, nothing, nothing, nothing, nothing, nothing), lifetimes)
    assert list(found) == ["collective", "collective", "activation", "collective", "gradient", "collective"]


def test_an_output_that_outlives_its_step_is_an_activation() -> None:
    """A list keeps it. What the next step frees is temporary, and so is what an update leaves behind."""
    ops = Ops.of(
        op_id=range(9),
        step=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        name=["aten.addmm.default", "aten.mul.Tensor", "aten.add.Tensor"] * 3,
        stack_id=[0, 1, 2] * 3,
        phase=["forward", "evaluation", "optimizer"] * 3,
    )
    created = np.array([0, 3, 6, 1, 4, 7, 2])
    freed = np.array([NONE, NONE, NONE, 4, 8, NONE, NONE])
    uses = Uses.of(op_id=created, storage_id=range(len(created)), role=["write"] * len(created))
    lifetimes = Lifetimes.of(created, freed, uses, ops)
    nothing = np.empty(0, dtype=np.int64)
    found = categorize(Facts(nothing, nothing, nothing, nothing, nothing, nothing), lifetimes)
    assert list(found) == ["activation"] * 3 + ["temporary"] * 4


def test_many_storages_take_no_text_of_their_own() -> None:
    """Of 200,000 storages of one step the longest name, of 60 letters, would take 48 MB as text of fixed width."""
    count = 200_000
    ops = Ops.of(
        op_id=range(2), step=[0, 0], name=["aten.mul.Tensor", "a" * 60], stack_id=[0, 1], phase=["forward"] * 2
    )
    created, freed = np.arange(count) % 2, np.where(np.arange(count) % 100, 1, NONE)
    tracemalloc.start()
    try:
        lifetimes = Lifetimes.of(created, freed, Uses.of(), ops)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not lifetimes.outlives.any()
    assert peak < 100 * count
