"""Sizes as the allocator rounds them, worked out by hand from its rules."""

from __future__ import annotations

import pytest

from memprof.replay.allocator.rules import MIB, Settings, rounded_request, segment_size, settings_from_options


@pytest.mark.parametrize(
    ("asked", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1023, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(asked: int, rounded: int) -> None:
    """Every block is a multiple of 512 bytes, and at least that."""
    assert rounded_request(asked) == rounded


@pytest.mark.parametrize(
    ("asked", "rounded"),
    [
        (1200 * MIB // 1024, 1280 * MIB // 1024),  # 1200 KiB: steps of 256 KiB between 1 and 2 MiB
        (MIB, MIB),  # a power of two stays
        (4 * 512, 4 * 512),  # not above 512 bytes a step: rounded as usual
        (2049, 2560),  # steps of 512 bytes between 2 and 4 KiB
        (7 * MIB + 1, 8 * MIB),
    ],
)
def test_requests_are_rounded_to_steps_between_powers_of_two(asked: int, rounded: int) -> None:
    """With roundup_power2_divisions 4 there are four steps from each power of two to the next."""
    assert rounded_request(asked, (4,) * 16) == rounded


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments_come_in_three_sizes(rounded: int, segment: int) -> None:
    """2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB, multiples of 2 MiB for the rest."""
    assert segment_size(rounded) == segment * MIB


def test_options_are_read_as_torch_reads_them() -> None:
    """In a list, each size holds for itself, the first for smaller ones too, and > for those above the last."""
    read = settings_from_options(
        {"expandable_segments": "True", "max_split_size_mb": "64", "roundup_power2_divisions": "[4:2,16:8,>:1]"}
    )
    assert read.expandable_segments
    assert read.max_split_size_bytes == 64 * MIB
    assert read.divisions == (2, 2, 2, 0, 8, *(1,) * 11)
    assert settings_from_options({"roundup_power2_divisions": "4"}).divisions == (4,) * 16
    assert settings_from_options({"backend": "native"}) == Settings()
