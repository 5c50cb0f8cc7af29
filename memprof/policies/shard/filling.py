"""Fills buckets with gradients in the order in which they come, as DistributedDataParallel does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MIB = 1 << 20
#: DDP makes its first bucket this large, so that sending begins early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = _MIB


def fill_buckets(numbers: Sequence[int], sizes_bytes: Iterable[int], bucket_mib: int) -> list[list[int]]:
    """Returns what each bucket holds, in order; one is full when it holds as much as it should, or more.

    Args:
        numbers: What to put into buckets, in order.
        sizes_bytes: Bytes of each.
        bucket_mib: Size of a bucket, the first of which may be smaller.
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
