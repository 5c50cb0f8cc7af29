"""What a plan is written from and into: the request, the text that came of it, and what the form cannot express."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from memprof.errors import UsageError
from memprof.policies.plan.plan import Plan


@dataclass(frozen=True)
class Request:
    """What is to be written.

    Attributes:
        plan: The plan.
        source: What the plan is called: its file, or the search it is from.
        module: Name that the written file can be imported by.
        batch: Samples of the job's whole batch; 0 where that is not known.
    """

    plan: Plan
    source: str
    module: str = "under_plan"
    batch: int = 0

    @property
    def parts(self) -> int:
        """Into how many micro-batches the plan splits a batch, 1 where it does not."""
        count = 1
        for policy in self.plan.policies:
            count *= getattr(policy, "micro_batches", 1)
        return count

    @property
    def ranks(self) -> int:
        """Over how many ranks the plan divides the job, 1 where it does not."""
        return max((getattr(policy, "world_size", 1) for policy in self.plan.policies), default=1)

    @property
    def batch_of_a_part(self) -> int:
        """Samples that one rank's model runs on at a time, 0 where that is not known.

        Raises:
            UsageError: The batch cannot be divided so.
        """
        shares = self.ranks if any(getattr(each, "batch", "") == "split" for each in self.plan.policies) else 1
        if self.batch % (self.parts * shares):
            raise UsageError(
                f"A batch of {self.batch} cannot be split evenly into {self.parts} micro-batches"
                f"{f' on each of {shares} ranks' if shares > 1 else ''}; give --batch a multiple of "
                f"{self.parts * shares}."
            )
        return self.batch // (self.parts * shares)


@dataclass(frozen=True)
class Emitted:
    """A plan in some form.

    Attributes:
        text: What to write to a file.
        cannot: What of the plan is not in it, a sentence each.
        notes: What is in it but works otherwise than in memprof, or is left to the reader; a sentence each.
        expressed: How many policies of the plan are in it, wholly or in part.
    """

    text: str
    cannot: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    expressed: int = 0


class Target(ABC):
    """A form that plans are written in.

    Attributes:
        name: What stands behind ``--to``.
        title: What people call it.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def emit(self, request: Request) -> Emitted:
        """Writes a plan in this form.

        Raises:
            UsageError: The batch that was given cannot be divided as the plan says.
        """
