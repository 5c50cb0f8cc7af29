"""Fills buckets with gradients in order of arrival, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MIB = 1 << 20
#: Size of DDP's first bucket, for an early first send (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = _MIB


def fill_buckets(numbers: Sequence[int], sizes_bytes: Iterable[int], bucket_mib: int) -> list[list[int]]:
    """Returns the contents of each bucket, in order; a bucket is full at or above its size.

    Args:
        numbers: Items to put into buckets, in order.
        sizes_bytes: Bytes of each.
        bucket_mib: Size of a bucket; the first may be smaller.
    """
    found: list[list[int]] = []
    room = 0
    for number, bytes_ in zip(numbers, sizes_bytes, strict=True):
        if room <= 0:
            room = bucket_mib * _MIB if found else min(_FIRST_BUCKET_BYTES, bucket_mib * _MIB)
            found.append([])
        found[-1].append(number)
        room -= bytes_
    return found
