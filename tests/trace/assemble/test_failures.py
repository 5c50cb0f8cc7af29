"""Which failed request ended a job, what waits for backward then, and what remains of it without the warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memprof.trace.assemble.memory.failures import is_fatal, kept_for_backward
from memprof.trace.files.spool import COLUMNS, Spool
from memprof.trace.files.trim import drop_warm_up
from memprof.trace.schema import NONE, Ops, OutOfMemory, Storages
from tests.building import Op, Storage, make_tables

NAMES = ["aten.mm.default", "profiler._record_function_exit._RecordFunction"]


def spool_of(operators: list[int], failures: list[int], fatal: list[int]) -> Spool:
    """Makes a recording of operators by the number of their name, some of which failed."""
    rows = np.zeros((len(operators), len(COLUMNS["operators"])), dtype=np.int64)
    rows[:, COLUMNS["operators"].index("name")] = operators
    records: dict[str, list[Any]] = {"out_of_memory": [{"op": op} for op in failures]}
    if fatal:
        records["fatal"] = list(fatal)
    return Spool(rows={"operators": rows}, records=records)


@pytest.mark.parametrize(
    ("operators", "failures", "fatal", "ended", "expected"),
    [
        ([0, 0, 0], [0, 2], [1], {"returncode": 1}, [False, True]),  # Python printed the second
        ([0, 0, 0], [0, 2], [], {"returncode": 3}, [False, True]),  # the job's own handler ended it
        ([0, 0, 0, 1], [2], [], {"returncode": 3}, [True]),  # the same, out of an optimizer's step
        ([0, 0, 0], [0, 1], [], {"returncode": 1}, [False, False]),  # it went on, and ended badly for another reason
        ([0, 0, 0], [2], [], {"returncode": 0}, [False]),  # it ended well
        ([0, 0, 0], [2], [], None, [False]),  # it is still running
        ([0, 0, 0], [2], [], {}, [False]),  # memprof was killed: how it ended is unknown
    ],
)
def test_what_ended_the_job(
    operators: list[int], failures: list[int], fatal: list[int], ended: dict[str, int] | None, expected: list[bool]
) -> None:
    """The one whose traceback Python printed, or the last where nothing ran since and the job did not end well."""
    spool = spool_of(operators, failures, fatal)
    assert [is_fatal(spool, number, NAMES, ended) for number in range(len(failures))] == expected


def test_forward_that_backward_did_not_come_to() -> None:
    """What forward made and is alive at the request waits for backward; what died before or backward made does not."""
    storages = [Storage("kept", 8), Storage("dead", 8), Storage("gradient", 8)]
    ops = [
        Op(makes=("kept", "dead")),
        Op(reads=("dead",), frees=("dead",)),
        Op(phase="backward", makes=("gradient",)),
        Op(phase="backward"),
    ]
    tables = make_tables([ops], [Storage(one.key, one.size, "temporary") for one in storages])
    made, table = tables[Storages], tables[Ops]
    assert isinstance(made, Storages)
    assert isinstance(table, Ops)
    failures = OutOfMemory.of(op_id=[3])
    assert kept_for_backward(made, failures, table).category.tolist() == ["activation", "temporary", "temporary"]
    assert kept_for_backward(made, OutOfMemory.of(op_id=[NONE]), table).category.tolist() == ["temporary"] * 3


def test_operators_are_numbered_anew_without_the_warm_up() -> None:
    """A request in a dropped warm-up has no operator any more; a later one has the same under a new number."""
    step = [Op(makes=("a",)), Op(reads=("a",), frees=("a",))]
    tables = make_tables([step, step], [Storage("a", 8)], kinds=("warm_up", "recorded"))
    tables[OutOfMemory] = OutOfMemory.of(op_id=[1, 3], requested_bytes=[5, 6])
    kept = drop_warm_up(tables)[OutOfMemory]
    assert isinstance(kept, OutOfMemory)
    assert kept.op_id.tolist() == [NONE, 1]
    assert kept.requested_bytes.tolist() == [5, 6]
