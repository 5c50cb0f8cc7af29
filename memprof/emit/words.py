"""The header of every emitted text: what the plan does and its prediction."""

from __future__ import annotations

import textwrap

from memprof.emit.emission import Request
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS
from memprof.units import format_bytes, format_us
from memprof.version import __version__

_WIDTH = 100


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
        lines += wrapped(f"Compared with the job without it: {NUMERICS_IN_WORDS[max(worst, key=_severity)]}.")
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


def _severity(numerics: str) -> int:
    return list(NUMERICS_IN_WORDS).index(numerics)
