"""Recordings state where a DataLoader's batches cannot be split into micro-batches."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Sampler, dataloader

import memprof
from memprof.planners.search.workbench import Workbench, find_frames
from memprof.trace.schema import HostNeeds
from memprof.trace.store import Trace


@dataclass
class Record:
    """A batch of a job's own."""

    x: torch.Tensor


class Opaque:
    """A batch whose attributes are the job's business."""

    def __init__(self, x: torch.Tensor) -> None:
        self.held = x

    @property
    def num_graphs(self) -> int:
        raise AssertionError("code of the job's was run")


COLLATES: dict[str, Any] = {
    "tensor": (torch.stack, lambda batch: batch),
    "tuple": (lambda rows: (torch.stack(rows), ["a"] * len(rows)), lambda batch: batch[0]),
    "dataclass": (lambda rows: Record(torch.stack(rows)), lambda batch: batch.x),
    "opaque": (lambda rows: Opaque(torch.stack(rows)), lambda batch: batch.held),
    "pairs": (lambda rows: {"x": torch.cat([*rows, *rows]).view(-1, 8)}, lambda batch: batch["x"]),
    "prompts": (lambda rows: [{"prompt": "a b"}] * len(rows), lambda batch: torch.randn(len(batch), 8)),
    "packed": (pack_sequence, lambda batch: batch.data.view(-1, 8)),
}


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        ("tensor", ""),
        ("tuple", ""),
        ("dataclass", ""),
        ("opaque", ""),
        ("pairs", "a DataLoader yields a dict, and no tensor in it has the 4 samples of the loader"),
        (
            "prompts",
            "a DataLoader yields a list of records without tensors, which the loop may compare with one another",
        ),
        ("packed", "a DataLoader yields a PackedSequence, and no tensor in it has the 4 samples of the loader"),
    ],
)
def test_what_cannot_be_split_is_said_and_not_tried(collate: str, said: str, tmp_path: Path) -> None:
    """Suggestions leave out what the run would refuse; of types whose code would run nothing is said."""
    collate_fn, rows_of = COLLATES[collate]
    loader = DataLoader(list(torch.randn(24, 8)), batch_size=4, collate_fn=collate_fn)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dataloader._BaseDataLoaderIter.__next__.__code__
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=2):
        for batch in loader:
            optimizer.zero_grad()
            model(rows_of(batch)).square().mean().backward()
            optimizer.step()
    assert dataloader._BaseDataLoaderIter.__next__.__code__ is before
    trace = Trace.open(tmp_path / "run.memprof")
    assert trace.manifest.undivided == said
    bench = Workbench(trace.steady_step(), deadline=float("inf"))
    bench.try_plan()
    find_frames(bench, {"accumulate"})
    refused = [why for why in bench.refused.values() if "cannot be split automatically" in why]
    assert bool(refused) == bool(said)
    assert not said or said in refused[0]


class Tagged:
    """A class whose objects are made by its own ``__new__``."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        made = super().__new__(cls)
        made.tag = "made"
        return made


class Shuffled(Sampler[list[int]]):
    """A sampler of batches that draws them to count them."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(24).view(-1, 4).tolist())

    def __len__(self) -> int:
        return len(list(iter(self)))


def test_loaders_are_made_and_drawn_as_without_a_recording(tmp_path: Path) -> None:
    """Of no class, signature, sampler or start method does a recording change anything; it knows each place once."""

    def run() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loader = type("Mine", (DataLoader, Tagged), {})(
                torch.ones(24, 8), batch_sampler=Shuffled(), num_workers=1, multiprocessing_context="fork"
            )
            for batch in loader:
                optimizer.zero_grad()
                model(batch * torch.rand(1)).square().mean().backward()
                optimizer.step()
        next(iter(DataLoader(torch.ones(1))))
        return loader.tag, model.weight.tolist(), signature(DataLoader)

    started = multiprocessing.get_start_method(allow_none=True)
    plain = run()
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=1):
        recorded = run()
    assert recorded == plain
    assert multiprocessing.get_start_method(allow_none=True) == started
    needs = Trace.open(tmp_path / "run.memprof").table(HostNeeds)
    assert needs.kind.tolist() == ["forked", "batch"]


def test_an_error_in_a_loader_has_the_traceback_it_always_had(tmp_path: Path) -> None:
    """Lines, columns and names through torch's iterator are those of the plain run."""

    def ends() -> str:
        try:
            next(iter(DataLoader(list(range(3)), collate_fn=lambda rows: 1 / 0)))
        except ZeroDivisionError:
            return traceback.format_exc()
        return ""

    plain = ends()
    with memprof.record(tmp_path / "run.memprof"):
        recorded = ends()
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert recorded == plain != ""
