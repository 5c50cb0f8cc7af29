"""By how much plans took more than was predicted for them, as runs and dry runs of this very job have shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.policies.base import Policy


@dataclass(frozen=True)
class Learned:
    """Errors by kinds of policies.

    What one policy was off by is expected of every plan that has it; so is what several were off by of every plan that
    has all of them. So a search goes on with the other policies as they are predicted.

    Attributes:
        errors: Kinds of the policies of a plan that was tried, and the bytes by which it was above its prediction.
    """

    errors: tuple[tuple[frozenset[str], int], ...] = ()

    def expected(self, policies: Iterable[Policy]) -> int:
        """Returns the bytes by which a plan is expected to be above its prediction; 0 where nothing is known of it."""
        if not self.errors:
            return 0
        kinds = frozenset(kinds_of(policies))
        return max((error for tried, error in self.errors if tried <= kinds), default=0)

    def with_error(self, policies: Iterable[Policy], error_bytes: int) -> Learned:
        """Returns what is known after another plan was tried.

        Args:
            policies: The plan's.
            error_bytes: What it took less what was predicted; of several of one kind of plan the most counts.
        """
        kinds = frozenset(kinds_of(policies))
        known = dict(self.errors)
        known[kinds] = max(known.get(kinds, 0), error_bytes)
        return Learned(tuple(known.items()))


def kinds_of(policies: Iterable[Policy]) -> tuple[str, ...]:
    """Returns what plans have in common that differ in the modules, or the numbers, that they choose only."""
    return tuple(
        policy.name if hasattr(policy, "modules") else re.sub(r"\d+", "#", policy.describe()) for policy in policies
    )
