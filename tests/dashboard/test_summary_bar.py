"""What the top of the page says of a recording without a complete step, and which button it offers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dash")

from memprof.trace.manifest import RUNNING, Capture, Machine, Manifest
from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from memprof.trace.whole_steps import is_cut_short
from memprof_dashboard import parts
from memprof_dashboard.figures.timeline import timeline
from memprof_dashboard.palette import THEMES
from memprof_dashboard.rank import Rank
from memprof_dashboard.state import View
from memprof_dashboard.summary_bar import facts_of
from tests.analysis.test_out_of_memory import tables_of
from tests.browsing import text_of
from tests.building import Op, Tables, make_trace

GIB = 1 << 30


def _failed(device_name: str) -> Rank:
    manifest = Manifest(
        target="train.py",
        command=("python", "train.py", "--layers", "8"),
        machine=Machine(device_name=device_name, device_kind="cuda"),
        capture=Capture(is_complete=False, reason="memory ran out"),
    )
    tables = tables_of(reserved_bytes=20 * GIB, free_bytes=GIB, total_bytes=24 * GIB)
    return Rank(Trace.of([(manifest, tables)], Path("run.memprof")).rank_trace(0))


def test_a_size_is_not_broken_between_its_number_and_its_unit() -> None:
    """And the sentence reads as before, also where it is cut."""
    sentence = "Does not fit on RTX 4090: needs 32.26 to 32.86 GiB of 1,023.61 GiB, 5 B short"
    shown = parts.sentence(sentence, 200)
    assert text_of(shown) == sentence
    assert [part.children for part in shown.children if not isinstance(part, str)] == [
        "32.86 GiB",
        "1,023.61 GiB",
        "5 B",
    ]
    cut = parts.sentence(sentence, 20)
    assert text_of(cut) == "Does not f… 5 B short"
    assert cut.title == sentence


def test_what_is_in_backticks_is_code() -> None:
    """A single backtick is a part of a name."""
    shown = parts.with_code("held by `losses[1]` (list)")
    assert [type(part).__name__ for part in shown.children] == ["str", "Code", "str"]
    assert text_of(shown) == "held by losses[1] (list)"
    assert text_of(parts.with_code("a`b")) == "a`b"


def test_operators_that_hold_nothing_are_shown() -> None:
    """A recording without storages has a peak of 0 B, of no category, and a timeline without an inset."""
    rank = Rank(make_trace([[Op(), Op(), Op()]], []))
    assert "0 B" in text_of(facts_of(rank, View()))
    assert [line["name"] for line in timeline(rank.history, 0, 3, THEMES["light"]).data] == ["total", "phase"]


def test_a_job_that_ran_out_is_offered_the_command_for_a_whole_step() -> None:
    """No plan can be made from it, so no search is offered; what was free is stated."""
    facts = facts_of(_failed("RTX 4090"), View())
    shown = str(facts)
    assert "Out of memory: aten.mul.Tensor requested 5.00 MiB on cuda:0" in text_of(facts)
    assert "cuda:0 has 24.00 GiB, 1.00 GiB of it free; 3.00 GiB are held outside torch's allocator." in shown
    command = "memprof record --dry-run --device rtx4090 -o whole.memprof train.py --layers 8"
    assert command in text_of(facts)
    assert shown.count(command) == 2  # on the clipboard, and as the button's title
    assert "whatif" not in shown


@pytest.mark.parametrize("reason", [RUNNING, "the job was interrupted"])
def test_no_command_where_memory_did_not_run_out(reason: str, small_tables: Tables) -> None:
    """A job in its first step, or one that ended in it for another reason, which a dry run would not prevent."""
    steps = small_tables[Steps]
    first = steps.take(steps.step == steps.step.min())
    tables = {**small_tables, Steps: first.replace(is_complete=np.zeros(len(first), dtype=np.bool_))}
    manifest = Manifest(
        command=("python", "train.py"),
        machine=Machine(device_name="RTX 4090", device_kind="cuda"),
        capture=Capture(is_complete=False, reason=reason),
    )
    rank = Rank(Trace.of([(manifest, tables)], Path("run.memprof")).rank_trace(0))
    assert is_cut_short(rank.trace)
    shown = str(facts_of(rank, View()))
    assert "--dry-run" not in shown
    assert "Button" not in shown


def test_no_command_where_the_device_cannot_be_simulated() -> None:
    """An unknown device: neither a command nor a search that would fail."""
    shown = str(facts_of(_failed("Some Accelerator"), View()))
    assert "--dry-run" not in shown
    assert "Button" not in shown
