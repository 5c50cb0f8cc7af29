"""What is combined with the policies that choose modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memprof.errors import PolicyError
from memprof.planners.search import frames


@pytest.mark.parametrize(("size", "counts"), [(4, [2, 4]), (5, [2, 4]), (64, [2, 4, 8, 16]), (None, [2, 4, 8, 16])])
def test_no_more_micro_batches_than_samples(size, counts, monkeypatch):
    """A batch is proposed to be divided into as many parts as it has samples at most; all are where that is unknown."""

    def find_batch(step: object) -> SimpleNamespace:
        if size is None:
            raise PolicyError("unknown")
        return SimpleNamespace(size=size)

    monkeypatch.setattr(frames, "find_batch", find_batch)
    monkeypatch.setattr(frames, "compares_samples", lambda step: False)
    stacks = SimpleNamespace(frames=["torch/utils/data/dataloader.py:1 __next__"])
    bench = SimpleNamespace(step=SimpleNamespace(stacks=stacks, undivided=""), refused={})
    assert [policy.micro_batches for policy in frames._accumulations(bench)] == counts
