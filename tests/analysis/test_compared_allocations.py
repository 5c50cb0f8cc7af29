"""Allocations of a real GPU beside those of a dry run: sequences, alignment, differences, verdict and exit code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.compared import comparison
from memprof.analysis.compared.allocation_sequence import read_sequence
from memprof.analysis.compared.comparison import EXTRA, MISSING, RESIZED, compare_sequences, find_gaps
from memprof.cli.main import main
from memprof.cli.pages.diff.allocations_diff import COLUMNS
from tests.recorder.recorded import record

_KIB = 1024
_CPP = "at::_ops::{}::call(at::Tensor const&)"


def snapshot(path: Path, sizes: list[tuple[str, int]], kept: int = 0, file: str = "train.py") -> str:
    """Writes a snapshot in which each allocation is freed after the next one; the last `kept` stay."""
    trace: list[dict[str, Any]] = []
    address, blocks = 1 << 30, []
    waiting: list[tuple[int, int]] = []

    def entry(action: str, at: int, size: int, name: str = "") -> None:
        frames = [{"filename": "??", "line": 0, "name": _CPP.format(name)}] if name else []
        frames.append({"filename": f"/job/{file}", "line": 7, "name": "main"})
        trace.append({"action": action, "addr": at, "size": size, "stream": 0, "frames": frames})

    def free(at: int, size: int) -> None:
        entry("free_requested", at, size)
        entry("free_completed", at, size)

    entry("segment_alloc", 1 << 30, 1 << 24)
    for place, (name, size) in enumerate(sizes):
        entry("alloc", address, size, name)
        if place >= len(sizes) - kept:
            blocks.append({"address": address, "size": -(-size // 512) * 512, "requested_size": size})
        else:
            waiting.append((address, size))
        address += -(-size // 512) * 512
        if len(waiting) > 1:
            free(*waiting.pop(0))
    for at, size in waiting:
        free(at, size)
    segment = {
        "device": 0,
        "address": 1 << 30,
        "total_size": 1 << 24,
        "allocated_size": sum(block["size"] for block in blocks),
        "active_size": sum(block["size"] for block in blocks),
        "stream": 0,
        "segment_type": "large",
        "blocks": [{**block, "state": "active_allocated", "frames": []} for block in blocks],
    }
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [trace]}))
    return str(path)


_STEP = [("mm", 64 * _KIB), ("relu", 32 * _KIB), ("mm", 16 * _KIB), ("_softmax", 8 * _KIB)]


def test_equal_sequences_are_equal_to_the_byte(tmp_path: Path) -> None:
    """Every allocation, the peak, both ends and the reserved bytes."""
    real = read_sequence(snapshot(tmp_path / "real.pickle", _STEP * 3, kept=2))
    dry = read_sequence(snapshot(tmp_path / "dry.pickle", _STEP * 3, kept=2))
    compared = compare_sequences(real, dry)
    assert compared.equal == len(real) == 12
    assert compared.differences == compared.gaps == ()
    assert compared.peak_error_bytes == compared.reserved_error_bytes == 0
    assert real.peak_bytes == (64 + 32) * _KIB  # two at a time
    assert real.start_bytes == 0
    assert real.end_bytes == 24 * _KIB
    assert real.operators[:2] == ["mm", "relu"]
    assert real.places[0] == "train.py:7"


def test_differences_have_kind_operator_and_line(tmp_path: Path) -> None:
    """An allocation that is missing, one too many, and one of another size by the same operator."""
    other = [("mm", 64 * _KIB), ("mm", 20 * _KIB), ("_softmax", 8 * _KIB), ("clone", 4 * _KIB)]
    real = read_sequence(snapshot(tmp_path / "real.pickle", _STEP))
    compared = compare_sequences(real, read_sequence(snapshot(tmp_path / "dry.pickle", other)))
    found = {(one.kind, one.operator, one.real_bytes, one.dry_bytes) for one in compared.differences}
    assert found == {
        (MISSING, "relu", 32 * _KIB, 0),
        (RESIZED, "mm", 16 * _KIB, 20 * _KIB),
        (EXTRA, "clone", 0, 4 * _KIB),
    }
    assert compared.equal == 2
    assert all(one.place == "train.py:7" for one in compared.differences)


@given(
    st.lists(st.sampled_from([512, 1024, 4096]), max_size=60),
    st.lists(st.sampled_from([512, 1024, 4096]), max_size=60),
)
def test_gaps_and_pairs_make_up_both_sequences(one: list[int], other: list[int]) -> None:
    """Between the gaps the sequences are equal, pair by pair, in pieces as well as whole."""
    for piece in (comparison._PIECE, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "_PIECE", piece)
            patch.setattr(comparison, "_AGAIN", piece // 5)
            gaps = find_gaps(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64))
        rest, left = list(one), list(other)
        for gap in reversed(gaps):
            del rest[gap.real_from : gap.real_to]
            del left[gap.dry_from : gap.dry_to]
        assert rest == left
        if one == other:
            assert gaps == []


def test_verdict_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on top; 4 if the peaks differ by more than is tolerated; the same figures in JSON."""
    real = snapshot(tmp_path / "real.pickle", _STEP)
    smaller = snapshot(tmp_path / "dry.pickle", [("mm", 60 * _KIB), *_STEP[1:]])
    assert main(["diff", real, real]) == 0
    assert "4 of 4 allocations equal, peak equal to the byte, reserved equal to the byte" in capsys.readouterr().out
    assert main(["diff", real, smaller]) == 4
    assert "3 of 4 allocations equal, peak \u22124.167 % (\u22124,096 B)" in capsys.readouterr().out
    assert main(["diff", "--tolerance", "5%", real, smaller]) == 0
    capsys.readouterr()
    assert main(["diff", "--json", real, smaller]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["equal_in_order"] == 3
    assert found["peak_error_bytes"] == -4 * _KIB
    assert found["differences"][0]["real_bytes"] == 64 * _KIB


def test_a_row_to_contribute_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell for each column of docs/how-true.md, without names of files; both lines, and a band where they differ."""
    real, dry = (snapshot(tmp_path / name, _STEP) for name in ("real.pickle", "dry.pickle"))
    assert main(["diff", "--format", "markdown", real, dry]) == 0
    row = capsys.readouterr().out.strip()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == len(COLUMNS)
    assert cells[2] == cells[3] == f"{len(_STEP)}"
    assert cells[6:8] == ["0 B", "0 B"]
    assert str(tmp_path) not in row
    figure = tmp_path / "both.svg"
    other = snapshot(tmp_path / "other.pickle", [*_STEP[:2], ("mm", 4 * _KIB), *_STEP[3:]])
    assert main(["diff", "--figure", str(figure), real, other]) in (0, 4)
    capsys.readouterr()
    text = figure.read_text(encoding="utf-8")
    assert text.count("<polyline") == 2
    assert "3 of 4 equal" in text
    assert "differences (1)" in text
    assert main(["diff", "--figure", str(tmp_path / "no" / "both.svg"), real, other]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert ".pickle" not in row


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["real.pickle"], 2, "nothing to compare the allocations of real.pickle with"),
        (["real.pickle", "--", "train.py"], 2, "--device"),
        (["--tolerance", "much", "real.pickle", "real.pickle"], 2, "is not a percentage"),
        (["--allocations", "missing.pickle", "real.pickle"], 5, "missing.pickle"),
        (["empty.pickle", "real.pickle"], 5, "no history"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    words: list[str],
    status: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was read, what is wrong, what to do."""
    monkeypatch.chdir(tmp_path)
    snapshot(tmp_path / "real.pickle", _STEP)
    (tmp_path / "empty.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert main(["diff", *words]) == status
    assert sentence in capsys.readouterr().err


_JOB = """
import sys, torch
from torch import nn
model = nn.Linear(64, int(sys.argv[1])).cuda()
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
torch.cuda.memory._record_memory_history()
for _ in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
torch.cuda.memory._dump_snapshot("job.pickle")
print("after")
"""


def test_a_script_is_dry_run_up_to_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command compares a snapshot with the script that wrote it, and leaves the snapshot as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_JOB)
    assert record(tmp_path, "--dry-run", "--device", "rtx4090", "train.py", "32").returncode == 0
    before = (tmp_path / "job.pickle").read_bytes()
    assert main(["diff", "--device", "rtx4090", "job.pickle", "--", "train.py", "32"]) == 0
    assert "peak equal to the byte" in capsys.readouterr().out
    assert main(["diff", "--device", "rtx4090", "job.pickle", "--", "train.py", "640"]) == 4
    assert (tmp_path / "job.pickle").read_bytes() == before
    assert main(["diff", "--device", "rtx4090", "job.pickle", "--", "missing.py"]) == 127
