"""The ranks of a job as a device mesh: rows and columns are its dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.ranks.rank_report import RankPeak
from memprof.errors import UsageError
from memprof.trace.schema import Floats
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Ranks of a row where the recording shows no nodes.
_WIDTH = 16
#: The only dimension of a mesh of one row.
_RANK = "rank"


@dataclass(frozen=True)
class Mesh:
    """A device mesh.

    Attributes:
        names: Its dimensions, the outermost first; ranks are numbered with the last one fastest.
        sizes: Their sizes.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Ranks in a row: the size of the last dimension."""
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        """Rows: the combinations of all other dimensions."""
        return math.prod(self.sizes[:-1])

    def row_name(self, row: int) -> str:
        """Names a row by its place in the outer dimensions, such as ``pp 1, dp 3``."""
        places = np.unravel_index(row, self.sizes[:-1]) if len(self.sizes) > 1 else ()
        return ", ".join(f"{name} {int(place)}" for name, place in zip(self.names[:-1], places, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def read_mesh(text: str, world_size: int) -> Mesh:
    """Reads a mesh such as ``pp=2, dp=4, tp=8``, the outermost dimension first, as in ``init_device_mesh``.

    Raises:
        UsageError: The text is not a mesh, or its size is not the number of ranks.
    """
    names, sizes = [], []
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name or not size.isdecimal() or not 0 < int(size) <= world_size:
            raise UsageError(
                f"invalid dimension {part.strip()[:40]!r} of the mesh: write each with its size, the outermost first, "
                "such as pp=2, dp=4, tp=8."
            )
        names.append(name[:20])
        sizes.append(int(size))
    if math.prod(sizes) != world_size:
        shape = " x ".join(map(str, sizes))
        raise UsageError(f"a mesh of {shape} has {math.prod(sizes):,} ranks, not {world_size:,}.")
    return Mesh(tuple(names), tuple(sizes))


def default_mesh(ranks: tuple[RankPeak, ...], world_size: int) -> Mesh:
    """Returns nodes by their ranks where all nodes have equally many, else one or more rows of 16 or fewer ranks."""
    nodes: dict[str, list[int]] = {}
    for one in ranks:
        nodes.setdefault(one.node, []).append(one.rank)
    share = world_size // len(nodes) if nodes else 0
    # A node's ranks follow one another, as launchers number them.
    blocks = [set(range(place * share, (place + 1) * share)) for place in range(-(-world_size // max(share, 1)))]
    if len(nodes) > 1 and share > 1 and all(set(own) <= blocks[min(own) // share] for own in nodes.values()):
        return Mesh(("node", "local rank"), (len(nodes), share))
    width = max(each for each in range(1, min(_WIDTH, world_size) + 1) if world_size % each == 0)
    rows = world_size // width
    return Mesh((_RANK,), (width,)) if rows == 1 else Mesh(("row", "column"), (rows, width))


def with_same_ranks(trace: Trace, ranks: tuple[RankPeak, ...]) -> tuple[RankPeak, ...]:
    """Adds, in a dry run, the ranks that were not run because they do the same as another, or are between two."""
    same = ((one, other) for one in ranks for other in trace.manifest_of(one.rank).same_ranks)
    added = [replace(one, rank=other) for one, other in same]
    peaks = {one.rank: one.peak_bytes for one in ranks}
    for one in ranks:
        held = trace.manifest_of(one.rank).between
        start, end = one.peak_bytes, peaks.get(held.other)
        if start is not None and end is not None:
            shares = zip(held.ranks, held.shares, strict=True)
            added += [
                replace(one, rank=rank, peak_bytes=round(start + share * (end - start))) for rank, share in shares
            ]
    return tuple(sorted((*ranks, *added), key=lambda one: one.rank))


def represented(trace: Trace, rank: int) -> tuple[int, ...]:
    """Returns the ranks that were not run, and whose place on the mesh shows this rank's recording."""
    manifest = trace.manifest_of(rank)
    return *manifest.same_ranks, *manifest.between.ranks


def peaks_on(mesh: Mesh, ranks: tuple[RankPeak, ...]) -> Floats:
    """Returns the peaks in the mesh's shape; NaN for ranks without a recording."""
    peaks = np.full(math.prod(mesh.sizes), np.nan)
    for one in ranks:
        if one.peak_bytes is not None and one.rank < len(peaks):
            peaks[one.rank] = one.peak_bytes
    return peaks.reshape(mesh.sizes)


def describe_worst(mesh: Mesh, peaks: Floats) -> str:
    """Says which rank has the highest peak and where on the mesh it is; "" where no rank has one."""
    if not np.isfinite(peaks).any():
        return ""
    rank = int(np.nanargmax(peaks))
    most = int(peaks.ravel()[rank])
    places = np.unravel_index(rank, mesh.sizes)
    where = ", ".join(f"{name} {int(place)}" for name, place in zip(mesh.names, places, strict=True))
    where = f" ({where})" if mesh.names != (_RANK,) else ""
    over = format_bytes(most - int(np.nanmedian(peaks)))
    return f"Rank {rank}{where} is highest: {format_bytes(most)}, {over} above the median."


def describe_differences(mesh: Mesh, peaks: Floats) -> str:
    """Says along which dimension peaks differ, and where: the spread of the means over all other dimensions."""
    spreads = []
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        rolled = np.moveaxis(peaks, axis, 0).reshape(size, -1)
        known = np.flatnonzero(np.isfinite(rolled).any(axis=1))
        if size < 2 or len(known) < 2:
            continue
        means = np.nanmean(rolled[known], axis=1)
        most, least = int(known[np.argmax(means)]), int(known[np.argmin(means)])
        spreads.append((float(means.max() - means.min()), name, most, least))
    if not spreads:
        return ""
    spreads.sort(key=lambda each: -each[0])
    if spreads[0][0] < 1:
        return "Peaks are the same along every dimension."
    parts = [
        f"{format_bytes(round(size))} along {name} ({name} {most} highest, {name} {least} lowest)"
        if size >= 1
        else f"nothing along {name}"
        for size, name, most, least in spreads
    ]
    return f"Mean peaks differ by {'; by '.join(parts)}."
