"""Growth is a rise over a window that goes on: in every step, or in steps at a rhythm that the window shows."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.leaks.growth import describe_growth, growth_of_run, rhythm
from memprof.analysis.leaks.held import Held
from memprof.analysis.leaks.leak import describe_leak
from memprof.analysis.leaks.leaks import LeakReport, find_leaks, growth_notice
from memprof.cli.main import main
from memprof.launch.outcome.verdict import Verdict
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Holders, Ops, Stacks, StepPeaks, Storages, Table
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, make_tables, make_trace

KEPT = 262_144


def grown(steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0) -> LeakReport:
    """Returns what grows in steps that make a tensor at one line, kept in ``adds``, and all freed in ``clears``."""
    return find_leaks(_trace(steps, adds, clears, batch))


def _trace(steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0) -> Trace:
    return make_trace(*_job(steps, adds, clears, batch))


def _job(
    steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0
) -> tuple[list[list[Op]], list[Storage]]:
    ops: list[list[Op]] = []
    held: list[str] = []
    storages: list[Storage] = []
    for step in range(steps):
        freed = [*([f"out{step - 1}"] if step and step - 1 not in adds else [])]
        if step in clears:
            freed, held = [*freed, *held], []
        held += [f"out{step}"] if step in adds else []
        storages.append(Storage(f"out{step}", KEPT + batch * step, shape="512x128"))
        ops.append([Op("aten.addmm.default", makes=[f"out{step}"], frees=freed, stack="/job/train.py:7:main")])
    return ops, storages


@pytest.mark.parametrize(
    ("births", "steps", "every"),
    [
        ([0, 1], 3, 1),  # each step adds something: the default window of three steps is enough
        ([0], 3, None),  # one of two: every second step, or once
        ([0, 2], 4, None),  # a distance, of which three steps are needed
        ([0, 2, 4], 6, 2),
        ([0, 2, 4, 6], 8, 2),
        ([0, 6, 12], 14, 6),  # once an epoch of six steps
        ([4], 9, None),
        ([], 9, 0),
        ([0, 1], 9, 0),  # a cache that filled in the first third
        ([0, 1, 2, 3], 12, 0),  # one that has been full for long
        ([5, 6, 7], 9, 1),  # a leak that begins later
        ([0, 1, 3, 4, 6, 7, 9], 11, 2),  # at no fixed distance, but never fewer
        ([0, 1, 2, 6], 11, None),
    ],
)
def test_the_rhythm_of_what_stays(births: list[int], steps: int, every: int | None) -> None:
    """What is added in the steps of a window and stays goes on, has ended, or is too seldom to know."""
    assert rhythm(births, steps) == every


def test_a_list_that_grows_in_every_second_step() -> None:
    """262,144 B every second step are 131,072 B a step, at the line that makes them."""
    report = grown(8, {0, 2, 4, 6})
    assert report.growth.bytes_per_step == KEPT // 2
    (leak,) = report.leaks
    assert (leak.every_steps, leak.line, leak.kept_bytes) == (2, "train.py:7", 4 * KEPT)
    assert describe_leak(leak).startswith("128.00 KiB a step (every 2 steps); kept since step 0")


def test_steps_too_few_for_the_rhythm_are_undecided() -> None:
    """The sentence says what stays, where it is made, and what to run."""
    report = grown(3, {0})
    assert report.growth.bytes_per_step is None
    assert report.growth.is_rise
    assert describe_growth(report.growth).startswith(
        "Cannot determine whether memory grows: 256.00 KiB of steps 0 to 2 stay, made at train.py:7, held by "
    )
    assert (
        "Record the whole run (`memprof record --light train.py`), or 12 steps (`--steps 12`)."
        in report.growth.why_unknown
    )


@pytest.mark.parametrize(
    ("adds", "clears", "batch"),
    [
        (set(range(12)), {3, 6, 9}, 0),  # a list that is cleared
        (set(range(12)), {5, 10}, 0),
        (set(), set(), 4096),  # batches that grow
        ({0, 1, 2}, set(), 0),  # a cache that fills up
        ({0}, set(), 0),  # what the first update sets up
    ],
    ids=["every-3", "every-5", "batches", "cache", "once"],
)
def test_what_is_no_growth(adds: set[int], clears: set[int], batch: int) -> None:
    """Lists that are cleared, growing batches and what is set up once end no gate."""
    assert grown(12, adds, clears, batch).growth.bytes_per_step == 0


def test_a_gate_is_not_passed_by_steps_that_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` ends with 3 where growth is undecided, with 4 where there is some, and with 0 where not."""
    paths = []
    for name, adds in (("undecided", {0}), ("grows", {0, 2, 4}), ("flat", set[int]())):
        steps = 3 if name == "undecided" else 6
        paths.append(str(tmp_path / f"{name}.memprof"))
        write_trace(paths[-1], [(Manifest(target="train.py"), make_tables(*_job(steps, adds)))])
    statuses = [main(["diff", path, "--fail-on", "growth>0"]) for path in paths]
    page = capsys.readouterr().out
    assert statuses == [3, 4, 0]
    assert "growth is undecided, these steps are too few: record more of them (`memprof record --steps 12`)" in page
    assert main(["diff", paths[2], paths[0], "--fail-on", "growth>0"]) == 3
    assert main(["diff", paths[0], paths[2], "--fail-on", "growth>0"]) == 0


def test_the_history_of_lbfgs_is_undecided(tmp_path: Path) -> None:
    """Its updates stay until ``history_size`` of them are there; another optimizer's state that stays is growth."""
    ops, storages = _job(6, set(range(6)))
    tables = make_tables(ops, [replace(one, category="optimizer_state") for one in storages])
    statuses = []
    for described in ("LBFGS closure lbfgs", "Adam foreach fused"):
        path = str(tmp_path / f"{described[:4]}.memprof")
        write_trace(path, [(Manifest(target="train.py", optimizers=(described,)), tables)])
        statuses.append(main(["diff", path, "--fail-on", "growth>0"]))
    assert statuses == [3, 4]


def test_a_run_measured_in_two_ways_says_how_many_steps_are_alike() -> None:
    """Six of the twelve peaks can be compared, too few: "has 12 steps; growth shows from 8 on" would be no reason."""
    hows = ["heard", "counted"] * 6
    found = growth_of_run(StepPeaks.of(step=range(12), allocated_bytes=[1000] * 12, how=hows))
    assert found is not None
    assert found.why_unknown == "the run has 12 steps, 6 of them measured alike; growth shows from 8 on."


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        ([1000 + 100 * (step // 2) for step in range(12)], 50),  # every second step
        ([1000 + 600 * (step // 100) for step in range(500)], 6),  # once in a hundred: longer than a sixth of the run
        ([1000 + 600 * (step > 400) for step in range(500)], None),
        ([1000 + 600 * (step > 140) for step in range(500)], 0),
    ],
    ids=["every-2", "epochs", "once-late", "once-early"],
)
def test_the_rhythm_of_a_run(sizes: list[int], growth: int | None) -> None:
    """The floor of a whole run need not rise in each of its parts; a single late rise is undecided."""
    found = growth_of_run(StepPeaks.of(step=range(len(sizes)), allocated_bytes=sizes, how=["counted"] * len(sizes)))
    assert found is not None
    assert found.bytes_per_step == growth


def _held(**columns: object) -> Holders:
    """Returns statements that `results` holds tensors, with the columns given."""
    count = len(next(iter(columns.values())))  # type: ignore[arg-type]
    known = {"kind": ["global"], "chain": ["results[0]"], "container": ["list"], "shape": ["512x128"]}
    known |= {"dtype": ["float32"], "device": ["cpu"], "storage_id": [NONE], "stack_id": [0], "made_step": [NONE]}
    known |= {"module_id": [NONE], "made_stack_id": [NONE], "has_graph": [False], "is_by_graph": [False]}
    return Holders.of(**{name: values * count for name, values in known.items() if name not in columns}, **columns)


def _with(trace_tables: dict[type[Table], Table], holders: Holders, stack: str = "/job/train.py:3:<module>") -> Trace:
    stacks = Stacks.of(stack_id=[0, 1], frames=[stack, "/job/train.py:7:main"], fx_nodes=["", ""])
    manifest = Manifest(target="train.py", command=("python", "train.py", "--epochs", "8"))
    return Trace.of([(manifest, {**trace_tables, Holders: holders, Stacks: stacks})], "run.memprof")


def test_growth_is_said_first_with_its_line_and_its_holder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both `report` and the summary of `record` begin with it, and name the page with every line."""
    tables = make_tables(*_job(4, set(range(4))))
    storages = tables[Storages]
    assert isinstance(storages, Storages)
    held = _held(step=[3], tensors=[4], total_bytes=[4 * KEPT], storage_id=[int(storages.storage_id[0])])
    ops = tables[Ops]
    assert isinstance(ops, Ops)
    trace = _with({**tables, Ops: ops.replace(stack_id=ops.stack_id + 1)}, held)
    cause = "made at train.py:7, held by `results[0]` (list) in train.py:3"
    says = f"Memory grows by 256.00 KiB a step (steps 0 to 3): {cause}."
    assert growth_notice(trace) == says
    path = str(tmp_path / "run.memprof")
    write_trace(path, [(trace.manifest, {kind: trace.table(kind) for kind in (*tables, Holders, Stacks)})])
    assert main(["report", path]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[0] == says
    assert f"next: memprof report {path} --leaks" in page
    assert str(Verdict("recorded 4 steps", growth=says)).splitlines()[0] == f"memprof: {says}"


def test_what_is_kept_after_the_window_is_undecided_and_names_the_whole_run() -> None:
    """Once an epoch is more seldom than any window: statements after it show what became more, and only that."""
    tables = make_tables(*_job(3, set()))
    grown = _held(step=[18, 27, 40], tensors=[3, 4, 6], total_bytes=[3 * KEPT, 4 * KEPT, 6 * KEPT])
    report = find_leaks(_with(tables, grown))
    assert report.growth.bytes_per_step is None
    assert "1.50 MiB so far, 512x128 float32, held by `results[0]` (list) in train.py:3" in report.growth.why_unknown
    assert "(`memprof record --light train.py --epochs 8`)" in report.growth.why_unknown
    # Kinds are told apart by their device, and are not stated each time: at step 40 others hold more bytes.
    own, other = grown.take(grown.step < 40), grown.take(grown.step == 40).replace(shape=np.array(["9"], dtype=object))
    same_step = own.replace(device=np.array(["cuda:0"] * 2, dtype=object), tensors=np.array([9, 9]))
    for beside in (other, same_step):
        report = find_leaks(_with(tables, Holders.joined([own, beside])))
        assert report.growth.bytes_per_step is None
        assert [leak.tensors for leak in report.leaks] == [4]
    for counts in ([3, 4, 4], [6, 3, 4], [4, 4, 4]):  # a cache that is full, a list that is cleared
        ended = _held(step=[12, 18, 40], tensors=counts, total_bytes=[KEPT * count for count in counts])
        assert find_leaks(_with(tables, ended)).growth.bytes_per_step == 0
    # Stated once, at the end: the rise of all tensors tells whether as many were added since.
    once = _held(step=[40], tensors=[4], total_bytes=[4 * KEPT])
    for counts, growth in (([5, 5, 9], None), ([5, 9, 5], 0), ([8, 8, 9], 0)):
        columns: Any = {"dtype": [""] * 3, "shape": [""] * 3, "chain": [""] * 3}
        totals = [KEPT * count for count in counts]
        sums = _held(step=[7, 15, 40], tensors=counts, total_bytes=totals, **columns)
        assert find_leaks(_with(tables, Holders.joined([sums, once]))).growth.bytes_per_step == growth


def test_growth_of_a_window_that_did_not_go_on_is_none() -> None:
    """A cache that was full after it, or a list that was cleared; at the end of the job, local variables are gone."""
    tables = make_tables(*_job(4, set(range(4))))
    ops, storages = tables[Ops], tables[Storages]
    assert isinstance(ops, Ops)
    assert isinstance(storages, Storages)
    window = _held(step=[3], tensors=[4], total_bytes=[4 * KEPT], storage_id=[int(storages.storage_id[0])])
    for sizes, counts, growth in (
        ([5, 6, 5], [5, 6, 5], 0),
        ([5, 12, 30], [5, 12, 30], KEPT),
        ([5, 12, 2], [5, 12, 2], KEPT),
        ([67, 34, 64], [8, 15, 25], KEPT),  # a large batch is alive at the first statement alone
        ([5, 12, 30], [5, 6, 5], KEPT),
    ):
        totals = [KEPT * size for size in sizes]
        later = _held(
            step=[7, 14, 24], tensors=counts, total_bytes=totals, shape=[""] * 3, dtype=[""] * 3, chain=[""] * 3
        )
        trace = _with({**tables, Ops: ops.replace(stack_id=ops.stack_id + 1)}, Holders.joined([window, later]))
        assert find_leaks(trace).growth.bytes_per_step == growth
        # The losses that a list keeps are more tensors, too: the statements on kinds tell one from the other.
        losses = _held(step=[14, 24], tensors=[8, 18], total_bytes=[32, 72], chain=["losses[3]"] * 2, shape=[""] * 2)
        joined = Holders.joined([trace.table(Holders), losses])
        trace = _with({**tables, Ops: ops.replace(stack_id=ops.stack_id + 1)}, joined)
        assert (find_leaks(trace).growth.bytes_per_step == KEPT) is (max(sizes) > sizes[0] + 5)


def _run(ends: Sequence[int], inputs: Sequence[int], holders: Holders) -> LeakReport:
    """Returns what grows in a whole run whose steps leave `ends` bytes and call models on `inputs` elements."""
    count = len(ends)
    peaks = StepPeaks.of(
        step=range(count), allocated_bytes=ends, how=["counted"] * count, end_bytes=ends, input_elements=inputs
    )
    return find_leaks(_with({**make_tables(*_job(2, set())), StepPeaks: peaks}, holders))


def test_a_whole_run_has_one_rate_for_what_is_kept_once_an_epoch() -> None:
    """The line was followed in one step of an epoch: it adds the growth of the run, in every sixth step."""
    ends = [10 * KEPT + KEPT * (step // 6) for step in range(60)]
    holders = Holders.joined(
        [
            _held(step=[27, 40], tensors=[4, 6], total_bytes=[4 * KEPT, 6 * KEPT]),
            _held(
                step=[27], tensors=[1], total_bytes=[KEPT], made_step=[24], made_stack_id=[1], op=["aten.cat.default"]
            ),
        ]
    )
    report = _run(ends, [64] * 60, holders)
    (leak,) = report.leaks
    assert report.growth.bytes_per_step == leak.bytes_per_step == round(KEPT / 6)
    assert (leak.every_steps, leak.line, leak.held_by is not None) == (6, "train.py:7", True)


def test_a_batch_that_grows_is_no_leak_of_a_whole_run() -> None:
    """Steps leave more as their inputs grow. With a line whose tensors stay, that line is the growth."""
    inputs = [64 + 16 * step for step in range(60)]
    ends = [10 * KEPT + 512 * size for size in inputs]
    assert _run(ends, inputs, _held(step=[8], tensors=[2], total_bytes=[8])).growth.bytes_per_step == 0
    steady = _held(step=[40, 40], tensors=[1, 1], total_bytes=[4096, 4352], made_step=[28, 29], made_stack_id=[1, 1])
    assert _run(ends, inputs, steady).growth.bytes_per_step == 4224
    assert (_run(ends, [64] * 60, _held(step=[8], tensors=[2], total_bytes=[8])).growth.bytes_per_step or 0) > 0


def test_a_rise_beyond_that_of_the_inputs_is_undecided() -> None:
    """Inputs that grow by 20 % do not explain memory that doubles; a rise that they do explain is not growth."""
    inputs = [640 + 2 * step for step in range(60)]
    nothing = _held(step=[8], tensors=[2], total_bytes=[8])
    doubled = _run([10 * KEPT + KEPT // 6 * step for step in range(60)], inputs, nothing)
    assert doubled.growth.bytes_per_step is None
    assert "by a larger share than the models' inputs" in describe_growth(doubled.growth)
    assert _run([KEPT * size for size in inputs], inputs, nothing).growth.bytes_per_step == 0


def _history(sizes: Sequence[int]) -> LeakReport:
    """Returns what grows where each step makes a tensor of these bytes from the one before, at one line."""
    ops = [
        [Op("aten.cat.default", makes=[f"h{n}"], reads=reads, frees=reads, stack="/job/train.py:7:main")]
        for n, reads in enumerate([[], *([f"h{n}"] for n in range(len(sizes) - 1))])
    ]
    return find_leaks(make_trace(ops, [Storage(f"h{n}", size) for n, size in enumerate(sizes)]))


def test_origins_are_followed_only_of_what_becomes_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is joined anew from the one before grows; of those of one size, nothing is looked up."""
    (leak,) = _history([KEPT * n for n in range(1, 7)]).leaks
    assert (leak.bytes_per_step, leak.every_steps, leak.kept_bytes) == (KEPT, 1, 6 * KEPT)
    monkeypatch.setattr(Held, "origins_of", lambda self, storage_id: pytest.fail("followed"))
    for sizes in ([KEPT] * 6, [KEPT * n for n in (1, 2, 3, 4, 5, 4)]):
        assert _history(sizes).growth.bytes_per_step == 0
