"""Input and output of emitting a plan: the request, the emitted text with its header, and what it cannot say."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from memprof.errors import UsageError
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS
from memprof.units import format_bytes, format_us
from memprof.version import __version__

_WIDTH = 100


@dataclass(frozen=True)
class Request:
    """What to emit.

    Attributes:
        plan: The plan.
        source: Origin of the plan: its file, or the search that found it.
        module: Import name of the written file.
        batch: Samples of the job's whole batch; 0 where unknown.
    """

    plan: Plan
    source: str
    module: str = "under_plan"
    batch: int = 0

    @property
    def parts(self) -> int:
        """Number of micro-batches the plan splits a batch into, 1 for none."""
        count = 1
        for policy in self.plan.policies:
            count *= getattr(policy, "micro_batches", 1)
        return count

    @property
    def ranks(self) -> int:
        """Number of ranks the plan shards the job over, 1 for none."""
        return max((getattr(policy, "world_size", 1) for policy in self.plan.policies), default=1)

    @property
    def batch_of_a_part(self) -> int:
        """Samples per rank and micro-batch, 0 where unknown.

        Raises:
            UsageError: The batch is not divisible by that many parts.
        """
        shares = self.ranks if any(getattr(each, "batch", "") == "split" for each in self.plan.policies) else 1
        if self.batch % (self.parts * shares):
            raise UsageError(
                f"a batch of {self.batch} cannot be split evenly into {self.parts} micro-batches"
                f"{f' on each of {shares} ranks' if shares > 1 else ''}; give --batch a multiple of "
                f"{self.parts * shares}."
            )
        return self.batch // (self.parts * shares)


@dataclass(frozen=True)
class Emitted:
    """A plan in one target format.

    Attributes:
        text: What to write to a file.
        cannot: Unsupported parts of the plan, one sentence each.
        notes: What is included but differs from memprof, or is left to the reader; one sentence each.
        expressed: Number of policies included, wholly or in part.
        arguments: The trainer's own settings in it, by name; {} for targets that are code.
    """

    text: str
    cannot: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    expressed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Target(ABC):
    """A format that plans are emitted in.

    Attributes:
        name: Value of ``--to``.
        title: Display name.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def emit(self, request: Request) -> Emitted:
        """Emits a plan in this format.

        Raises:
            UsageError: The given batch is not divisible as the plan requires.
        """


def plain(text: str) -> str:
    """Sanitizes text for a comment or a docstring: one line, without terminators."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line.replace("\\", "/").replace('"""', "'''")


def about(request: Request, target: str) -> list[str]:
    """Describes the plan, its origin and its prediction, in lines of text."""
    plan = request.plan
    lines = ["Trains under a memprof plan.", ""]
    lines += wrapped(f"Plan: {plain(plan.describe())}.")
    lines += wrapped(f"Written by memprof {__version__} from {plain(request.source)}, for {target}.")
    prediction = plan.prediction
    if prediction is not None:
        place = f" of {plain(prediction.peak_module)}" if prediction.peak_module else ""
        lines += wrapped(
            f"Predicted: peak {format_bytes(prediction.peak_allocated_bytes)} allocated, in {prediction.peak_phase}"
            f"{place}, step {format_us(prediction.step_time_us)}; without the plan "
            f"{format_bytes(prediction.recorded_peak_bytes)} and {format_us(prediction.recorded_step_time_us)}."
        )
    worst = [word for each in plan.policies if (word := plan.numerics_of(each)) != "none"]
    if worst:
        lines += wrapped(
            f"Compared with the job without it: {NUMERICS_IN_WORDS[max(worst, key=list(NUMERICS_IN_WORDS).index)]}."
        )
    for sentence in () if prediction is None else prediction.changes:
        lines += wrapped(plain(sentence))
    return lines


def listed(title: str, sentences: tuple[str, ...]) -> list[str]:
    """Returns titled lines for a list of sentences; empty where there are none."""
    if not sentences:
        return []
    lines = ["", title]
    for sentence in sentences:
        first, *rest = wrapped(plain(sentence))
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return lines


def wrapped(sentence: str) -> list[str]:
    """Wraps a sentence into lines."""
    return textwrap.wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
