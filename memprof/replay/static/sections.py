"""The moments that matter for offsets: those at which a set of lives is alive that no other moment has all of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.trace.schema import Floats, Ints


@dataclass(frozen=True, eq=False)
class Sections:
    """Lives over sections: the moments at which a set of lives is alive that no other moment has all of.

    Two lives that meet meet in a section, so that offsets are valid if they are in each section.

    Attributes:
        rows: Index of each among the lives given, shape ``(lives,)``.
        size: Its bytes.
        ops: Operators it is needed during.
        first: Its first section.
        end: The section after its last.
        count: Number of sections.
    """

    rows: Ints
    size: Ints
    ops: Ints
    first: Ints
    end: Ints
    count: int

    @classmethod
    def of(cls, first: Ints, last: Ints, size: Ints) -> Sections:
        """Finds the sections of some lives.

        Args:
            first: First operator of each, shape ``(lives,)``.
            last: Last operator of each, itself included.
            size: Bytes of each.
        """
        # A section is the operator of a start that is followed by an end before the next start.
        starts, ends = np.unique(first), np.unique(last)
        chosen = starts[np.unique(np.searchsorted(starts, ends, side="right")) - 1]
        return cls(
            rows=np.arange(len(size)),
            size=size,
            ops=last - first + 1,
            first=np.searchsorted(chosen, first),
            end=np.searchsorted(chosen, last, side="right"),
            count=len(chosen),
        )

    def __len__(self) -> int:
        """Returns the number of lives."""
        return len(self.size)

    def take(self, rows: Ints) -> Sections:
        """Returns the lives in another order."""
        columns = {name: getattr(self, name)[rows] for name in ("rows", "size", "ops", "first", "end")}
        return replace(self, **columns)

    def total(self) -> Ints:
        """Returns the bytes in each section, shape ``(count,)``."""
        change = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.end, self.size)
        total: Ints = np.cumsum(change[:-1])
        return total

    def crossing(self) -> Ints:
        """Returns how many lives are in both a section and the next one, shape ``(count,)``; none after the last."""
        change = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(change, self.first, 1)
        np.subtract.at(change, self.end - 1, 1)
        crossing: Ints = np.cumsum(change[:-1])
        return crossing

    def members(self) -> tuple[Ints, Ints]:
        """Returns the lives of each section, one section after the other, and where each section starts in them."""
        spans = self.end - self.first
        life = np.repeat(np.arange(len(self)), spans)
        section = np.arange(len(life)) - np.repeat(np.cumsum(spans) - spans, spans) + self.first[life]
        order = np.argsort(section, kind="stable")
        return life[order], np.searchsorted(section[order], np.arange(self.count + 1))

    def fullest(self) -> Ints:
        """Returns the bytes of the fullest section each life is in, shape ``(lives,)``."""
        total = self.total()
        spans = np.stack([self.first, self.end], axis=1).ravel()
        padded = np.append(total, 0)
        fullest: Ints = np.maximum.reduceat(padded, spans)[::2]
        return fullest

    def shuffled(self, random: np.random.Generator) -> Sections:
        """Returns the lives ordered by a random weighting of the measures, with a little noise."""
        weights = random.dirichlet(np.ones(4)) * (1, 1, 1, 4)
        measures = np.stack([self.end - self.first, self.ops, self.size, self.fullest()])
        score: Floats = weights @ np.log(np.maximum(measures, 1)) + random.normal(0, 0.02, len(self))
        return self.take(np.argsort(-score, kind="stable"))
