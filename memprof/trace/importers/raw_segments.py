"""Examines a snapshot's segments: repeated and impossible ones, and the memory pool of each entry."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np

from memprof.trace.importers.columns import Entries, check_dicts
from memprof.trace.schema import Segments

#: No device has as much memory: 1 TiB.
_MOST_BYTES = 1 << 40


def examine_segments(raw: list[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """Returns the distinct segments, and sentences on those that repeat, overlap, or have an impossible size.

    Args:
        raw: The segments of one device, as loaded.

    Raises:
        BadInputError: A segment's blocks are not a list of dicts.
    """
    seen: dict[Any, Any] = {}
    repeated, impossible, uneven = 0, 0, 0
    for segment in raw:
        address, size = segment.get("address"), segment.get("total_size")
        if type(address) is int and address in seen:
            repeated += 1
            continue
        seen[address if type(address) is int else id(segment)] = segment
        if type(size) is int and not 0 <= size <= _MOST_BYTES:
            impossible += 1
        blocks = segment.get("blocks", [])
        check_dicts(blocks, "the blocks of a segment")
        sizes = [block.get("size", 0) for block in blocks]
        if blocks and type(size) is int and all(type(one) is int for one in sizes) and sum(sizes) != size:
            uneven += 1
    kept = list(seen.values())
    overlapping = _overlapping(kept)
    remarks = [
        f"{_count(repeated)} at the address of another one: left out." if repeated else "",
        f"{_count(impossible)} of an impossible size; reserved bytes may be off." if impossible else "",
        f"{_count(uneven)} whose blocks do not add up to its size." if uneven else "",
        f"{_count(overlapping)} that overlaps the one before it." if overlapping else "",
    ]
    return kept, tuple(remark for remark in remarks if remark)


def with_pools(entries: Entries, segments: Segments) -> Entries:
    """Returns entries with the memory pool of their segment, which only the latest torch writes to each entry."""
    if any(entries.pool) or not len(segments) or not any(segments.segment_pool.tolist()):
        return entries
    order = np.argsort(segments.address, kind="stable")
    first = segments.address[order]
    place = order[np.maximum(np.searchsorted(first, entries.address, side="right") - 1, 0)]
    inside = (entries.address >= segments.address[place]) & (
        entries.address < segments.address[place] + segments.total_size_bytes[place]
    )
    pools = np.where(inside, segments.segment_pool[place], "")
    return dataclasses.replace(entries, pool=pools.tolist())


def _overlapping(segments: list[Any]) -> int:
    spans = sorted(
        (segment["address"], segment["total_size"])
        for segment in segments
        if type(segment.get("address")) is int and type(segment.get("total_size")) is int
    )
    return sum(first + size > second for (first, size), (second, _) in pairwise(spans))


def _count(number: int) -> str:
    return f"{number:,} segment" if number == 1 else f"{number:,} segments"
