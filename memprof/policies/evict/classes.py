"""Equivalence classes of values that are recomputed together: a union-find structure that sums time or bytes."""

from __future__ import annotations


class Classes:
    """Classes that are joined and never split; a member that leaves takes its amount along.

    Source: Kirisame 2021, appendix C. Members are numbers; each eviction makes a new one, so a value evicted again
    leaves its old class unchanged.
    """

    def __init__(self) -> None:
        """Starts without classes."""
        self._joined_to: list[int] = []
        self._amount: list[float] = []
        self._total: list[float] = []

    def add(self, amount: float) -> int:
        """Adds a class of one member, with its time or bytes, and returns the member's number."""
        number = len(self._joined_to)
        self._joined_to.append(number)
        self._amount.append(amount)
        self._total.append(amount)
        return number

    def of(self, number: int) -> int:
        """Returns the class of a member, as the number of one of its members."""
        joined_to = self._joined_to
        while joined_to[number] != number:
            joined_to[number] = number = joined_to[joined_to[number]]
        return number

    def join(self, number: int, other: int) -> None:
        """Joins the classes of two members."""
        number, other = self.of(number), self.of(other)
        if number != other:
            self._joined_to[other] = number
            self._total[number] += self._total[other]

    def leave(self, number: int) -> None:
        """Subtracts a member's amount from its class."""
        self._total[self.of(number)] -= self._amount[number]

    def total(self, number: int) -> float:
        """Returns the summed amount of a class, by the number that ``of`` returns."""
        return self._total[number]

    def clear(self) -> None:
        """Removes all classes; numbers start again at 0."""
        self._joined_to.clear()
        self._amount.clear()
        self._total.clear()
