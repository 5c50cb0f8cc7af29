"""What collectives take on a ring of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, each of which sends to the next.

    A ring algorithm takes N - 1 rounds to gather or to reduce, in each of which every rank sends 1/N of the data.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    Attributes:
        ranks: Number of ranks N.
        bytes_per_us: What a rank sends in a microsecond.
        latency_us: What a message takes besides.
    """

    ranks: int
    bytes_per_us: float
    latency_us: float

    def all_gather_us(self, total_bytes: int) -> float:
        """Returns the time until every rank has all of the data, whose size as a whole is given."""
        return (self.ranks - 1) * (self.latency_us + total_bytes / self.ranks / self.bytes_per_us)

    def reduce_scatter_us(self, total_bytes: int) -> float:
        """Returns the time until every rank has its part of the sum."""
        return self.all_gather_us(total_bytes)

    def all_reduce_us(self, total_bytes: int) -> float:
        """Returns the time until every rank has the sum: it is scattered first, then gathered."""
        return self.reduce_scatter_us(total_bytes) + self.all_gather_us(total_bytes)
