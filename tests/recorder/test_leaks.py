"""Planted leaks are found with their size, their age and what holds them; a job whose memory stops growing has none."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memprof.analysis.leaks.growth import growth_of_run, steady_rise
from memprof.analysis.leaks.leak import Leak
from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from memprof.cli.main import main
from memprof.recorder.memory.holders import Holder, find_holders
from memprof.recorder.memory.references import read_locals, running_frames
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import StepPeaks
from memprof.trace.store import write_trace
from tests.recorder.recorded import Ended, record, record_script
from tests.trace.importers.writing import MIB, block, frame, segment, snapshot, write

JOBS = Path(__file__).parent / "jobs"
LEAKING, SETTLING = JOBS / "leaking.py", JOBS / "settling.py"
#: Line, chain and kind of each planted leak.
PLANTED = [
    (number, found[1].strip(), found[2])
    for number, line in enumerate(LEAKING.read_text().splitlines(), start=1)
    if (found := re.search(r"#(?: type:.*#)? ([^#|]+) \| (\w+)$", line))
]


def leaks_of(folder: Path, job: Path, *options: str, steps: int = 8) -> LeakReport:
    """Records a job in a process of its own and returns what grows in it."""
    return find_leaks(record(folder, "-q", *options, str(job), str(steps)).trace)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The recording of the job with all leaks."""
    return record(tmp_path_factory.mktemp("leaking"), "-q", str(LEAKING), "8")


@pytest.fixture(scope="module")
def leaking(recorded: Ended) -> LeakReport:
    """What grows in it."""
    return find_leaks(recorded.trace)


def at_line(report: LeakReport, line: int) -> Leak:
    """Returns the leak of a line of the job."""
    (leak,) = [leak for leak in report.leaks if leak.line.endswith(f"leaking.py:{line}")]
    return leak


def test_all_leaks_add_up_to_the_growth(leaking: LeakReport) -> None:
    """The planted lines, and what their graphs and gradients keep: each of 8 KiB, but for sums and weights."""
    assert len(PLANTED) == 29
    assert 29 <= len(leaking.leaks) <= 40
    assert sum(leak.bytes_per_step for leak in leaking.leaks) == leaking.growth.bytes_per_step
    assert (leaking.growth.first_step, leaking.growth.last_step) == (2, 4)


@pytest.mark.parametrize(("line", "chain", "kind"), PLANTED, ids=[chain for _, chain, _ in PLANTED])
def test_a_planted_leak_is_found_with_what_holds_it(leaking: LeakReport, line: int, chain: str, kind: str) -> None:
    """The step since which tensors stay, the line that makes them and the references to them are named."""
    leak = at_line(leaking, line)
    assert (leak.since_step, leak.tensors >= 2) == (2, True)
    assert leak.held_by is not None
    if kind == "graph":  # of which there are several, but only one of all steps
        assert (leak.held_by.chain, leak.held_by.kind, leak.held_by.is_by_graph) == (chain, "global", True)
        return
    assert (chain in leak.held_by.chain, leak.held_by.kind) == (True, kind), leak.held_by


def test_gradients_that_are_kept_are_leaks(leaking: LeakReport) -> None:
    """They are made by backward, for the line that calls the model."""
    held = {leak.held_by.chain for leak in leaking.leaks if leak.held_by is not None}
    assert any(chain.startswith("HISTORY['gradients'][") for chain in held)


def test_a_job_whose_memory_stops_growing_has_no_leak(tmp_path: Path) -> None:
    """Caches that fill up, ring buffers and tensors replaced every step do not count as growth."""
    report = leaks_of(tmp_path, SETTLING, "--steps", "8", steps=12)
    assert (report.growth.bytes_per_step, report.leaks) == (0, ())


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> LeakReport:
    """What grows in a whole run of the job with all leaks."""
    return leaks_of(tmp_path_factory.mktemp("followed"), LEAKING, "--light", steps=60)


def test_a_whole_run_shows_a_leak_by_its_counts(followed: LeakReport) -> None:
    """With --light, the floor of the peaks rises over the run."""
    assert followed.growth.how == "counts"
    assert 27 * 64 * 32 * 4 < (followed.growth.bytes_per_step or 0) < 45 * 64 * 32 * 4


def test_a_whole_run_names_each_line_with_its_growth(followed: LeakReport) -> None:
    """The steps followed once memory grows show every planted line, and nearly add up to the growth."""
    lines = {leak.line.rpartition(":")[2]: leak for leak in followed.leaks if leak.line}
    assert {str(number) for number, *_ in PLANTED} <= set(lines)
    growth = followed.growth.bytes_per_step or 0
    assert 0.95 * growth <= sum(leak.bytes_per_step for leak in lines.values()) <= growth
    # The job's function has returned when the run ends. References are followed for a limited time: on a busy machine
    # some holders stay unknown, but none is named wrongly.
    lasting = [one for one in PLANTED if one[2] in ("global", "cache", "class")]
    held = {number: found for number, *_ in lasting if (found := lines[str(number)].held_by) is not None}
    assert len(held) >= len(lasting) / 2
    for number, chain, kind in lasting:
        if number in held:
            assert (chain in held[number].chain, held[number].kind) == (True, kind)


_FAILING = """
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(20):
    kept += [torch.ones(256), torch.ones(256)]
    loss = model(torch.randn(2, 4)).sum()
    if step == 13:
        loss = loss + torch.ones(2) @ torch.ones(3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_error_in_a_followed_step_is_printed_without_the_recorders_frames(tmp_path: Path) -> None:
    """The operator fails below the mode that follows it, outside any module."""
    done = record_script(tmp_path, _FAILING, "-q", "--light")
    assert done.returncode == 1
    assert "torch.ones(2) @ torch.ones(3)" in done.stderr
    assert "operators.py" not in done.stderr


def test_a_whole_run_without_a_leak_shows_none(tmp_path: Path) -> None:
    """The counts of a run whose memory stops growing do not rise."""
    assert leaks_of(tmp_path, SETTLING, "--light", steps=60).growth.bytes_per_step == 0


def test_the_page_and_the_gate(recorded: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """The page begins with the growth; a gate on growth fails in CI, and names the page as the next step."""
    path = str(recorded.path)
    assert main(["report", path, "--leaks", "--top", "3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("Memory grows by 23")
    assert len(page.splitlines()) == 6
    assert main(["report", path, "--leaks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_step"] > 200_000
    assert main(["diff", path, "--fail-on", "growth>0"]) == 4
    assert f"next: memprof report {path} --leaks" in capsys.readouterr().out
    assert main(["diff", path, "--fail-on", "growth>1MiB"]) == 0
    assert main(["report", path, path]) == 2


def test_a_series_of_snapshots_shows_what_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three snapshots of one job, the line whose blocks become more in each is named."""
    paths = []
    for count in (1, 2, 3):
        blocks = [block(MIB, frames=[frame("/job/model.py:9", "keep")]) for _ in range(count)]
        content = snapshot([segment(0, block(5 * MIB, frames=[frame("/job/model.py:3", "make")]), *blocks)])
        paths.append(str(tmp_path / f"{count}.memprof"))
        write_trace(paths[-1], import_file(write(tmp_path / "s.pickle", content)).ranks)
    assert main(["report", "--leaks", *paths]) == 0
    page = capsys.readouterr().out
    assert page.startswith(
        "Memory in use at the end grows from each recording to the next: 6.00 MiB, 7.00 MiB, 8.00 MiB"
    )
    assert "model.py:9" in page
    assert "model.py:3" not in page
    assert main(["report", "--leaks", *paths[:2]]) == 2


@pytest.mark.parametrize(
    ("sizes", "rise"),
    [([100, 110, 120, 130], 10), ([100, 110, 120, 120], 0), ([100, 110, 150, 155], 0), ([130, 120, 110], 0)],
)
def test_a_steady_rise_is_growth(sizes: list[int], rise: int) -> None:
    """What is replaced by something larger each time rises by the same; batches of different sizes do not."""
    assert steady_rise(np.array(sizes)) == rise


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        ([1000 + 3 * step + 50 * (step % 4) for step in range(2000)], 3),
        ([1000 + min(3 * step, 900) for step in range(2000)], 0),
        ([1000 + 50 * (step % 7) for step in range(2000)], 0),
        ([1000 + 900 * (1 - 0.99**step) for step in range(2000)], 0),
    ],
    ids=["leak", "cache", "batches", "saturates"],
)
def test_growth_of_a_run_is_that_of_its_floor(sizes: list[float], growth: int) -> None:
    """Over thousands of steps, the lowest peaks of each part rise with a leak, and stop with a cache."""
    peaks = StepPeaks.of(step=range(2000), allocated_bytes=[int(size) for size in sizes], how=["counted"] * 2000)
    found = growth_of_run(peaks)
    assert found is not None
    assert found.bytes_per_step == growth


def hold_for_a_moment() -> tuple[Holder, Any, list[Any]]:
    """Looks for the holder of a tensor in a local variable."""
    kept = [torch.zeros(8)]
    gone = weakref.ref(kept[0])
    (held,) = find_holders([kept[0]])
    return held, gone, kept


def test_looking_for_holders_keeps_nothing_alive() -> None:
    """A tensor whose last variable goes is gone."""
    held, gone, kept = hold_for_a_moment()
    assert (held.kind, held.chain, held.container) == ("local", "kept[0]", "list")
    assert held.variable is not None
    assert held.variable.function == "hold_for_a_moment"
    kept.clear()
    gc.collect()  # other tests' threads may be looking at frames just then
    assert gone() is None


def test_locals_are_not_read_where_the_job_could_notice() -> None:
    """The dictionary that a function has read itself stays as it is."""

    def reads() -> dict[str, Any]:
        value = torch.zeros(2)
        before = locals()
        (frame,) = [one for one in running_frames() if one.f_code.co_name == "reads"]
        read_locals(frame)
        assert value is before["value"]
        return before

    assert "value" in reads()


def test_tensors_that_nothing_in_python_holds_have_no_chain() -> None:
    """A tensor that only the caller's argument holds is found without a chain."""
    found = find_holders([torch.ones(4).sum()])
    assert [(one.kind, one.chain) for one in found] == [("unknown", "")]


def test_proxies_and_overridden_methods_are_not_called() -> None:
    """An object that fakes its class, and a list that counts its readers, are followed without touching them."""
    touched: list[str] = []

    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            touched.append("class")
            return dict

    class Counting(list[Any]):
        def __iter__(self) -> Any:
            touched.append("iter")
            return super().__iter__()

    def look() -> Holder:
        proxy = Proxy()
        proxy.kept = Counting([torch.zeros(3)])  # type: ignore[attr-defined]
        return find_holders([list.__getitem__(proxy.kept, 0)])[0]  # type: ignore[attr-defined]

    assert look().chain == "proxy.kept[0]"
    assert touched == []
