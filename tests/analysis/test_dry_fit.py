"""Whether a job fits a simulated device: the interval outside torch's allocator, and the sentence."""

from __future__ import annotations

import pytest

from memprof.analysis.allocator.dry_fit import DryFit
from memprof.machines.catalogue import CONTEXT_BYTES
from memprof.machines.outside import LAZY, NCCL

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("reserved", "sentence", "fits"),
    [
        (22 * _GIB, "Fits on RTX 4090: needs 22.14 to 22.75 GiB of 23.00 GiB", True),
        (22 * _GIB + _GIB // 2, "May not fit on RTX 4090: needs 22.64 to 23.25 GiB of 23.00 GiB", False),
        (24 * _GIB, "Does not fit on RTX 4090: needs 24.14 to 24.75 GiB of 23.00 GiB (at least 1.14 GiB short)", False),
    ],
)
def test_a_job_fits_if_it_does_with_the_upper_end(reserved: int, sentence: str, fits: bool) -> None:
    """Between the ends the sentence says that it may not; beyond the lower one, by how much at least."""
    fit = DryFit(
        machine="RTX 4090",
        capacity_bytes=23 * _GIB,
        least_outside_bytes=LAZY.least_bytes,
        outside_bytes=LAZY.most_bytes,
        reserved_bytes=reserved,
        allocated_bytes=20 * _GIB,
        largest="activation",
        share=0.5,
    )
    assert fit.describe().startswith(sentence)
    assert fit.fits is fits
    assert ("Largest category: activation" in fit.describe()) is not fits


def test_communicators_widen_the_interval_and_name_their_source() -> None:
    """A job of one rank has none; each adds NCCL's published figures."""
    assert LAZY.with_communicators(0) == LAZY
    both = LAZY.with_communicators(2)
    assert both.least_bytes == LAZY.least_bytes + 2 * NCCL.least_bytes
    assert both.most_bytes == CONTEXT_BYTES + 2 * NCCL.most_bytes
    assert NCCL.source in both.source
