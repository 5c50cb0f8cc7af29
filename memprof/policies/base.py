"""What every policy is: settings, and two faces that are held to each other by tests."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memprof.policies.runtime.job import Job
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
        errors_seen: By how much measured peaks were below and above predicted ones at most, on jobs that the transform
            was not made with (docs/benchmarks.md), as shares of what the step makes beside what it finds.
        errors_combined: The same, in addition, beside a policy that ``handles_saved``.
    """

    name: ClassVar[str]
    flag_help: ClassVar[str] = ""
    flag_example: ClassVar[str] = ""
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "replayed"
    errors_seen: ClassVar[tuple[float, float]] = (0.0, 0.0)
    errors_combined: ClassVar[tuple[float, float]] = (0.0, 0.0)

    @classmethod
    @abstractmethod
    def from_flag(cls, text: str) -> Self:
        """Reads the short form of the command line: what stands behind ``--<name>``.

        Raises:
            PolicyError: The text makes no sense; the sentence says what would.
        """

    def transform(self, step: Step) -> Step:
        """Predicts: rewrites a recorded step into the one that would have happened under the policy.

        Calls ``transform(step, policy)`` of the policy's own ``transform.py``.

        Args:
            step: The step, recorded or transformed by the policies before; left as it is.

        Raises:
            PolicyError: The policy does not fit the step; the sentence says why.
        """
        rewritten: Step = self._module("transform").transform(step, self)
        return rewritten

    def transform_at_most(self, step: Step) -> Step:
        """Rewrites a step like ``transform``, with what a recording does not tell taken at its most.

        Calls ``transform(step, policy, at_most=True)`` where the policy ``guesses``.

        Raises:
            PolicyError: The policy does not fit the step.
        """
        if not self.guesses:
            return self.transform(step)
        rewritten: Step = self._module("transform").transform(step, self, at_most=True)
        return rewritten

    def errors(self, steps: Sequence[Step]) -> tuple[float, float]:
        """Returns ``errors_seen`` for a job, by its operators, where they run and how its steps differ.

        Args:
            steps: The steps as recorded, the one that a plan is chosen on first.
        """
        return self.errors_seen

    @property
    def handles_saved(self) -> bool:
        """Whether it changes when what forward saves for backward is in memory, or runs operators again."""
        return False

    @property
    def guesses(self) -> bool:
        """Whether there is something that a recording does not tell; ``transform_at_most`` takes it at its most."""
        return False

    @property
    def held_bytes(self) -> int | None:
        """The most allocated bytes, where the policy holds the job below them while it runs; None where it does not."""
        return None

    def apply(self, job: Job) -> None:
        """Makes it happen in real training, before the job's first step.

        Calls ``apply(job, policy)`` of the policy's own ``apply.py``.

        Args:
            job: The model and the optimizers to change; what is done is undone through it.

        Raises:
            PolicyError: The policy does not fit the job; nothing has been changed.
        """
        self._module("apply").apply(job, self)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables a job needs from its start."""
        return {}

    @property
    def starts_early(self) -> bool:
        """Whether something must happen in the job's process before the job's own code runs."""
        return False

    def start(self) -> None:
        """Does what must happen in the job's process before the job's own code runs; ``apply`` takes over from it.

        Calls ``start(policy)`` of the policy's own ``apply.py`` where the policy ``starts_early``. Only for jobs that
        are started under a plan: where a plan is applied by hand, it is never called.
        """
        if self.starts_early:
            self._module("apply").start(self)

    @abstractmethod
    def describe(self) -> str:
        """Says in a few words what it does, for a table: ``checkpoint layers.*``."""

    def _module(self, name: str) -> Any:
        """Imports a module of the policy's own folder; only ``apply`` needs torch."""
        return importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.{name}")
