"""The interface of a policy: its settings, its predictor and its runtime; tests hold the two to each other."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from memprof.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memprof.policies.runtime.job import Job
    from memprof.trace.step import Step

#: Effect of a policy on the numbers the job computes: none, rounding only, an approximation, or other values, such as
#: statistics over fewer samples.
NUMERICS = ("none", "rounding", "approximate", "different")

#: How a prediction was obtained, most accurate first: every operator and storage replayed, the job dry-run under the
#: policy, sizes modelled, a rule of thumb, or measured in an earlier run.
SOURCES = ("replayed", "dry-run", "modelled", "rule", "measured")


@dataclass(frozen=True, eq=False)
class Candidates:
    """Settings of one policy that a search tries on a step.

    Attributes:
        whole_step: Settings that concern the whole step; tried alone, then combined with other policies.
        unsuitable: Settings that are not worth trying, with the reason.
    """

    whole_step: tuple[Policy, ...] = ()
    unsuitable: Mapping[Policy, str] = field(default_factory=dict)


class Policy(ABC):
    """One technique and its settings; subclasses are frozen dataclasses whose fields are the settings.

    Settings are validated on construction (``__post_init__``) and are plain: str, int, float, bool, or a tuple of str.
    A policy that does not fit a model or a step raises PolicyError with the reason; it is never applied partially.

    Attributes:
        name: Its key in a plan file and its flag on the command line.
        flag_help: Help text of ``--<name>``.
        flag_example: An example value of the flag: ``'layers.*'``.
        numerics: One of NUMERICS, for steps without ``changes``.
        source: One of SOURCES: how its transform obtains the prediction.
        errors_seen: Largest errors of predicted peaks on validation jobs (docs/benchmarks.md): how far measured peaks
            were below and above them, as shares of the bytes the step allocates on top of those it starts with.
        time_errors_seen: The same for step times, as shares of the predicted one; None where they were not measured.
        tried_by_default: Whether a search uses the policy where the user names none.
        takes_inputs: Whether a policy for some modules also changes what they save of the tensors that others made.
        has_candidates: Whether the policy's folder has a ``candidates.py``.
        errors_combined: Additional errors when combined with a policy that ``handles_saved``.
        tried_live: Whether a search for a job in the middle of training uses it where the user names none.
        live_refusal: Why it cannot be applied in the middle of training; "" where it can.
        dry_refusal: Why a dry run cannot apply it, and what to do instead; "" where it can.
        changes_kernels: Whether it changes which kernels run: a search that may run the job takes the step under it
            from a dry run, not from its model.
        divides_batches: Whether the model sees smaller inputs under it.
        flag_words: Values of ``--<name>`` that shells complete; where empty, ``flag_example``.
        flag_is_list: Whether ``--<name>`` takes several of these words, separated by commas.
        frameworks_set_it: Whether training frameworks have settings of their own for it (precision, accumulation, the
            optimizer), so that emitted code must not apply it to the model as well.
        set_in_framework: Which setting does its work, for each training framework in which a callback cannot apply it
            ("hf", "lightning"): the reason, and what to set.
    """

    name: ClassVar[str]
    flag_help: ClassVar[str] = ""
    flag_example: ClassVar[str] = ""
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "replayed"
    errors_seen: ClassVar[tuple[float, float]] = (0.0, 0.0)
    errors_combined: ClassVar[tuple[float, float]] = (0.0, 0.0)
    time_errors_seen: ClassVar[tuple[float, float] | None] = None

    tried_by_default: ClassVar[bool] = False
    takes_inputs: ClassVar[bool] = False
    has_candidates: ClassVar[bool] = False
    tried_live: ClassVar[bool] = False
    live_refusal: ClassVar[str] = ""
    dry_refusal: ClassVar[str] = ""
    changes_kernels: ClassVar[bool] = False
    divides_batches: ClassVar[bool] = False

    flag_words: ClassVar[tuple[str, ...]] = ()
    flag_is_list: ClassVar[bool] = False
    frameworks_set_it: ClassVar[bool] = False
    set_in_framework: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def from_flag(cls, text: str) -> Self:
        """Parses the short form of the command line: the value of ``--<name>``.

        Raises:
            PolicyError: The text is invalid; the message gives a valid form.
        """

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        """Returns the settings that a search tries on a step.

        Calls ``candidates(step, world_size)`` of the policy's own ``candidates.py`` where it ``has_candidates``.
        """
        if not cls.has_candidates:
            return Candidates()
        found: Candidates = cls._module("candidates").candidates(step, world_size)
        return found

    @classmethod
    def module_choices(cls, step: Step, call: range) -> tuple[Callable[[tuple[str, ...]], Policy], ...]:
        """Returns functions that make the policy for chosen modules, given their names; none if it chooses none.

        Args:
            step: The recorded step.
            call: The operators of one call of one of the modules; the others run the same ones.
        """
        return ()

    def transform(self, step: Step) -> Step:
        """Predicts: rewrites a recorded step into the one that would have happened under the policy.

        Calls ``transform(step, policy)`` of its own ``transform.py``, an estimate where it ``changes_kernels``.

        Args:
            step: The step, recorded or transformed by earlier policies; not modified.

        Raises:
            PolicyError: The policy does not fit the step, or has no estimate; the message gives the reason.
        """
        if not self.has_transform():
            raise PolicyError(f"{self.name} has no estimate: only a dry run of the recorded job predicts it.")
        rewritten: Step = self._module("transform").transform(step, self)
        return rewritten

    @classmethod
    def has_transform(cls) -> bool:
        """Returns whether it can be predicted without a dry run; only a policy that ``changes_kernels`` need not."""
        own = cls.transform is not Policy.transform
        return own or importlib.util.find_spec(f"{cls.__module__.rpartition('.')[0]}.transform") is not None

    def transform_at_most(self, step: Step) -> Step:
        """Rewrites a step like ``transform``, with worst-case values for whatever a recording leaves open.

        Calls ``transform(step, policy, at_most=True)`` where the policy ``guesses``.

        Raises:
            PolicyError: The policy does not fit the step.
        """
        if not self.guesses:
            return self.transform(step)
        rewritten: Step = self._module("transform").transform(step, self, at_most=True)
        return rewritten

    def changes(self, step: Step) -> tuple[str, ...]:
        """Returns what it changes in the numbers of a step beyond ``numerics``, one clause each; none by default."""
        return ()

    def numerics_in(self, step: Step) -> str:
        """Returns its effect on the numbers of a step, one of NUMERICS."""
        return NUMERICS[-1] if self.changes(step) else self.numerics

    @property
    def caveat(self) -> str:
        """What it changes for the job's own code, whatever the step, a clause; "" for nothing."""
        return ""

    @property
    def splits_all_blocks(self) -> bool:
        """Whether the caching allocator, under it, splits every block to the size of its request."""
        return False

    @property
    def takes_host(self) -> bool:
        """Whether it keeps tensors of a device in host memory."""
        return False

    def host_bytes(self, step: Step) -> int:
        """Returns the bytes of pinned host memory that a policy which ``takes_host`` takes, at their peak.

        Calls ``host_bytes(step, policy)`` of the policy's own ``transform.py``.

        Raises:
            PolicyError: The policy does not fit the step.
        """
        if not self.takes_host:
            return 0
        found: int = self._module("transform").host_bytes(step, self)
        return found

    def errors(self, steps: Sequence[Step]) -> tuple[float, float]:
        """Returns ``errors_seen`` for a job, given its operators, its devices and how its steps differ.

        Args:
            steps: The recorded steps; the one the plan is chosen on comes first.
        """
        return self.errors_seen

    @property
    def variants(self) -> tuple[Policy, ...]:
        """The same policy with other settings that a search tries once modules are chosen; none by default."""
        return ()

    def narrower(self, step: Step) -> tuple[Policy, ...]:
        """Returns the same policy restricted to parts of what it affects, from small to large; none by default.

        A search whose plan contains the policy looks for the smallest part that is enough.
        """
        return ()

    @property
    def handles_saved(self) -> bool:
        """Whether it changes when saved tensors are in memory, or recomputes operators."""
        return False

    @property
    def guesses(self) -> bool:
        """Whether the prediction depends on something not recorded; ``transform_at_most`` takes the worst case."""
        return False

    @property
    def held_bytes(self) -> int | None:
        """The hard memory cap in allocated bytes that the policy enforces at run time; None without one."""
        return None

    @property
    def needs_optimizer(self) -> bool:
        """Whether it changes the optimizer or its state, so that it cannot be applied to the model alone."""
        return False

    @property
    def changes_update(self) -> bool:
        """Whether it changes what the optimizer's update reads and writes."""
        return self.needs_optimizer

    @property
    def changes_forward(self) -> bool:
        """Whether it changes what a forward makes, also one that only evaluates."""
        return not self.changes_update

    @property
    def excludes_sharding(self) -> bool:
        """Whether it cannot be applied to parameters that fully_shard has divided over ranks."""
        return self.changes_update

    def refusal_within(self, plan: Sequence[Policy]) -> str:
        """Returns why it cannot be predicted as a part of a plan, a sentence; "" where it can."""
        return ""

    @property
    def why_not_torch(self) -> str:
        """Why torch's own API has no equivalent, so that emitted code calls memprof; "" where it has one."""
        return "torch has no equivalent"

    def apply(self, job: Job) -> None:
        """Applies the policy to real training, before the job's first step.

        Calls ``apply(job, policy)`` of the policy's own ``apply.py``.

        Args:
            job: The model and the optimizers to change; undo actions are registered on it.

        Raises:
            PolicyError: The policy does not fit the job; nothing has been changed.
        """
        self._module("apply").apply(job, self)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that must be set when the job starts."""
        return {}

    @property
    def starts_early(self) -> bool:
        """Whether the policy has work to do in the job's process before the job's own code runs."""
        return False

    def start(self) -> None:
        """Runs in the job's process before the job's own code; ``apply`` takes over later.

        Calls ``start(policy)`` of the policy's own ``apply.py`` where the policy ``starts_early``. Only for jobs
        launched under a plan: never called where a plan is applied by hand.
        """
        if self.starts_early:
            self._module("apply").start(self)

    @abstractmethod
    def describe(self) -> str:
        """Returns a short description for a table: ``checkpoint layers.*``."""

    @classmethod
    def _module(cls, name: str) -> Any:
        """Imports a module from the policy's own folder; only ``apply`` needs torch."""
        return importlib.import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")
