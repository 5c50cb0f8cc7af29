"""What every policy is: settings, and two faces that are held to each other by tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from memprof.policies.job import Job
    from memprof.trace.step import Step

#: What a policy does to the numbers the job computes: nothing, rounding only, or an approximation.
NUMERICS = ("none", "rounding", "approximate")

#: How a prediction was obtained, the surest first: every operator and storage replayed, sizes modelled, a rule of
#: thumb, or a number measured in an earlier run.
SOURCES = ("replayed", "modelled", "rule", "measured")


class Policy(ABC):
    """One technique and its settings; subclasses are frozen dataclasses whose fields are the settings.

    Settings are checked when the policy is made (``__post_init__``) and are plain: str, int, float, bool, or a tuple
    of str. A policy that does not fit a model or a step raises PolicyError and says why; it never half-applies.

    Attributes:
        name: Its key in a plan file and its flag on the command line.
        flag_help: What ``--<name>`` does, for the help of the command line.
        flag_example: What may stand behind it: ``'layers.*'``.
        numerics: One of NUMERICS.
        source: One of SOURCES: how its transform knows.
    """

    name: ClassVar[str]
    flag_help: ClassVar[str] = ""
    flag_example: ClassVar[str] = ""
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "replayed"

    @classmethod
    @abstractmethod
    def from_flag(cls, text: str) -> Self:
        """Reads the short form of the command line: what stands behind ``--<name>``.

        Raises:
            PolicyError: The text makes no sense; the sentence says what would.
        """

    @abstractmethod
    def transform(self, step: Step) -> Step:
        """Rewrites a recorded step into the one that would have happened.

        Args:
            step: The step, recorded or transformed by the policies before; left as it is.

        Raises:
            PolicyError: The policy does not fit the step; the sentence says why.
        """

    @abstractmethod
    def apply(self, job: Job) -> None:
        """Makes it happen in real training, before the job's first step.

        Args:
            job: The model and the optimizers to change; what is done is undone through it.

        Raises:
            PolicyError: The policy does not fit the job; nothing has been changed.
        """

    def environment(self) -> dict[str, str]:
        """Returns the environment variables a job needs from its start."""
        return {}

    def start(self) -> None:  # noqa: B027 - most policies have nothing to do so early
        """Does what must happen in the job's process before the job's own code runs; apply takes over from it.

        Only for jobs that are started under a plan: where a plan is applied by hand, it is never called.
        """

    @abstractmethod
    def describe(self) -> str:
        """Says in a few words what it does, for a table: ``checkpoint layers.*``."""
