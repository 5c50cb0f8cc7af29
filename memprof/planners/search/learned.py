"""Prediction errors of plans, as measured by runs and dry runs of this job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.policies.base import Policy


@dataclass(frozen=True)
class SeenErrors:
    """Prediction errors by kinds of policies.

    The error of one policy is expected of every plan that contains it; the error of a combination, of every plan that
    contains all of it. Other policies keep their predictions.

    Attributes:
        errors: Kinds of policies of each plan tried, and the bytes by which it exceeded its prediction.
    """

    errors: tuple[tuple[frozenset[str], int], ...] = ()

    def expected(self, policies: Iterable[Policy]) -> int:
        """Returns the bytes by which a plan is expected to exceed its prediction; 0 where unknown."""
        if not self.errors:
            return 0
        kinds = frozenset(kinds_of(policies))
        return max((error for tried, error in self.errors if tried <= kinds), default=0)

    def with_error(self, policies: Iterable[Policy], error_bytes: int) -> SeenErrors:
        """Returns the errors with those of another plan added.

        Args:
            policies: The plan's.
            error_bytes: Measured minus predicted bytes; for plans of the same kinds the largest counts.
        """
        kinds = frozenset(kinds_of(policies))
        known = dict(self.errors)
        known[kinds] = max(known.get(kinds, 0), error_bytes)
        return SeenErrors(tuple(known.items()))


def kinds_of(policies: Iterable[Policy]) -> tuple[str, ...]:
    """Returns the kinds of a plan, equal for plans that differ only in the modules or numbers they choose."""
    return tuple(
        policy.name if hasattr(policy, "modules") else re.sub(r"\d+", "#", policy.describe()) for policy in policies
    )
