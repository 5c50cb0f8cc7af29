"""Computes the duration of collectives on a ring of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, each sending to the next.

    A ring algorithm gathers or reduces in N - 1 rounds; in each, every rank sends 1/N of the data.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    Attributes:
        ranks: Number of ranks N.
        bytes_per_us: Bandwidth of a rank.
        latency_us: Latency of a message.
    """

    ranks: int
    bytes_per_us: float
    latency_us: float

    def all_gather_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has all of the data, given its total size."""
        return (self.ranks - 1) * (self.latency_us + total_bytes / self.ranks / self.bytes_per_us)

    def reduce_scatter_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has its part of the sum."""
        return self.all_gather_us(total_bytes)

    def all_reduce_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has the sum: a reduce-scatter, then an all-gather."""
        return self.reduce_scatter_us(total_bytes) + self.all_gather_us(total_bytes)
