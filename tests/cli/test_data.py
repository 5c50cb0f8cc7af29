"""`memprof data`: the batch of a job's data that peaks highest, found without training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from memprof.analysis.plans.data_batches import DataBatches
from memprof.cli.main import main
from memprof.virtual import data_survey
from memprof.virtual.data_survey import DataSurvey, _collect, _spread

#: Attention over a long sentence decides, not the batch of most elements; two micro-batches make an update.
JOB = """
import torch
from torch.utils.data import DataLoader

lengths = [*[8] * 6, 9, 8, 64, *[8] * 7]
rows = [[torch.ones(length, 4)] * (2 if length == 64 else 20) for length in lengths]
query = torch.nn.Linear(4, 4)
opt = torch.optim.Adam(query.parameters())
for batch, x in enumerate(DataLoader(rows, batch_size=None, collate_fn=torch.stack)):
    (query(x) @ x.mT).softmax(-1).sum().backward()
    if batch % 2:
        opt.step(); opt.zero_grad()
print("the whole epoch")
"""


def test_the_worst_batch_is_named_with_its_peak_and_how_often_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB, encoding="utf-8")
    assert main(["data", "--json", str(job)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batches"], found["batches_read"], found["worst_batch"], found["alike"]) == (16, 16, 8, 1)
    assert found["line"] == "job.py:9"
    assert not found["is_shuffled"]
    (part,) = found["parts"]
    assert (part["typical_shape"], part["worst_shape"]) == ("20x8x4", "2x64x4")
    assert (part["least"], part["most"]) == (2 * 64 * 4, 20 * 9 * 4)
    # The softmax of 2 x 64 x 64 floats, against that of 20 x 8 x 8.
    assert found["worst_bytes"] - found["steady_bytes"] > 4 * (2 * 64 * 64 - 20 * 8 * 8)


def test_a_job_without_updates_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.py"
    job.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2, 2))\n", encoding="utf-8")
    assert main(["data", str(job)]) == 3
    assert "the job made no training step: no optimizer updated parameters." in capsys.readouterr().err


def test_parts_of_a_batch_have_the_names_of_their_places() -> None:
    image, boxes = torch.ones(3, 8, 8), torch.ones(5, 4)
    targets = ({"boxes": boxes, "labels": boxes[:, 0]}, {"boxes": boxes[:2], "labels": boxes[:2, 0]})
    parts: dict[str, list[tuple[int, ...]]] = {}
    _collect(((image, image), targets), "", parts)
    assert parts == {"[0][*]": [(3, 8, 8)] * 2, "[1][*].boxes": [(5, 4), (2, 4)], "[1][*].labels": [(5,), (2,)]}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64])
def test_batches_are_read_in_an_order_that_covers_the_epoch(count: int) -> None:
    order = list(_spread(count))
    assert sorted(order) == list(range(count))
    assert max(order[:2], default=0) >= count // 2


def test_the_verdict_states_how_often_as_a_bound() -> None:
    found = DataBatches("train.py:9", 400, 400, 1.0, True, (), 2**30, 2**31, 7, 1)
    assert found.describe() == "Steady 1.00 GiB, worst batch 2.00 GiB (at least 1 in 400 batches: batch 7)."
    assert found.describe_reading() == (
        "All 400 batches of an epoch read in 1.0 s (train.py:9).",
        "The loader shuffles or samples: batches of other epochs differ, and may be larger.",
    )


class _Rows(Dataset[torch.Tensor]):
    """Eight rows, and how often one was read."""

    reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        self.reads += 1
        return torch.full((3,), place)


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


def test_a_loader_without_steps_is_read_once(tmp_path: Path) -> None:
    """An evaluation that comes every few steps costs the time of reading its data once."""
    rows = _Rows()
    survey, loader = DataSurvey(tmp_path / "survey.json", 5.0, lambda: 0), DataLoader(rows, batch_size=2)
    lengths = [len(list(survey._yield(loader, DataLoader.__iter__))) for _ in range(3)]
    assert rows.reads == 8
    assert len(set(lengths)) == 1


def test_a_sampler_that_never_ends_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places are not listed for as long as there is time: that would take all memory."""
    monkeypatch.setattr(data_survey, "_MOST_INDICES", 64)
    survey, loader = DataSurvey(tmp_path / "survey.json", 60.0, lambda: 0), DataLoader(_Rows(), 4, sampler=_Endless())
    walk, order = survey._read(loader, DataLoader.__iter__)
    assert len(walk.index) == 16
    assert order
