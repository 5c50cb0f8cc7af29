"""The memory of a job over the commits of its repository."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from memprof.analysis.diff.comparison import Diff, compare
from memprof.analysis.diff.explain import Cause, explain
from memprof.analysis.diff.gates import Gate, measure
from memprof.analysis.diff.summary import Summary, read_summary, summary_to_json
from memprof.errors import BadInputError
from memprof.trace.files.reading import parse_json, read_text

#: Version of the lines' keys.
HISTORY_SCHEMA = 1
_LARGEST_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        hash: Its full hash.
        date: Its author's date, such as 2026-11-26.
        author: The author's name.
        subject: The first line of its message.
    """

    hash: str
    date: str
    author: str
    subject: str

    @property
    def short(self) -> str:
        """The first letters of its hash."""
        return self.hash[:10]


@dataclass(frozen=True)
class Job:
    """What was run at each commit; only measurements of one job are compared.

    Attributes:
        command: The script and its arguments, secrets masked.
        device: The simulated device; "" for the CPU.
        window: Steps skipped, and steps recorded.
    """

    command: str
    device: str = ""
    window: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Measurement:
    """The result of a job at one commit.

    Attributes:
        commit: The commit.
        job: The job.
        summary: The summary of its recording; None if it could not be recorded.
        reason: The reason for a missing summary; "" if there is one.
    """

    commit: Commit
    job: Job
    summary: Summary | None
    reason: str = ""


def read_history(path: Path) -> list[Measurement]:
    """Reads a history; of several lines for one commit and job, the last counts.

    Returns:
        The measurements, in the order of those lines; none if the file does not exist.

    Raises:
        BadInputError: A line is damaged, or of a later version.
    """
    if not path.exists():
        return []
    found: dict[tuple[str, Job], Measurement] = {}
    for number, line in enumerate(read_text(path, _LARGEST_BYTES).splitlines(), 1):
        if line.strip():
            one = _read(line, f"{path}:{number}")
            found.pop((one.commit.hash, one.job), None)  # its place is that of the last line
            found[one.commit.hash, one.job] = one
    return list(found.values())


def append_to_history(path: Path, one: Measurement) -> None:
    """Adds a line to a history.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(measurement_to_json(one), allow_nan=False) + "\n")


def measurement_to_json(one: Measurement) -> dict[str, Any]:
    """Returns a measurement ready for ``json.dump``."""
    commit, job = one.commit, one.job
    return {
        "memprof_history": HISTORY_SCHEMA,
        "commit": commit.hash,
        "date": commit.date,
        "author": commit.author,
        "subject": commit.subject,
        "job": job.command,
        "device": job.device,
        "window": list(job.window),
        "reason": one.reason,
        "summary": None if one.summary is None else summary_to_json(one.summary),
    }


def _read(line: str, name: str) -> Measurement:
    try:
        record = parse_json(line)
        version = record["memprof_history"]
        if version != HISTORY_SCHEMA:
            raise BadInputError(f"{name} is of version {version}; this memprof reads version {HISTORY_SCHEMA}.")
        texts = [_text(record[key]) for key in ("commit", "date", "author", "subject", "job", "device", "reason")]
        skip, steps = (int(number) for number in record["window"])
        made = record["summary"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{name} is not a line of memprof history: {error!r}.") from None
    summary = None if made is None else read_summary(json.dumps(made), name)
    return Measurement(Commit(*texts[:4]), Job(texts[4], texts[5], (skip, steps)), summary, texts[6])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


@dataclass(frozen=True)
class Step:
    """A change from one measured commit to the next.

    Attributes:
        before: The earlier commit.
        after: The commit at which the measure changed.
        base: The measure before, in bytes or microseconds.
        head: The measure after.
        causes: What changed, the likeliest cause first.
    """

    before: Measurement
    after: Measurement
    base: float
    head: float
    causes: tuple[Cause, ...]

    @property
    def change(self) -> float:
        """What was added; negative for a decrease."""
        return self.head - self.base


def compare_commits(base: Summary, head: Summary, *, fail: Sequence[Gate] = ()) -> Diff:
    """Compares one job at two commits. A model whose class was renamed is compared all the same.

    Raises:
        UsageError: A gate names a phase that neither has.
    """
    return compare([dataclasses.replace(base, model="")], [head], fail=fail)


def steps_in(history: Sequence[Measurement], gate: Gate, least_share: float) -> list[Step]:
    """Finds the commits at which a measure changed, compared with the measured commit before.

    Args:
        history: The measurements, in the order of the commits.
        gate: What is measured.
        least_share: Smallest change that counts, as a share of the value before.
    """
    found = []
    for before, after in pairwise([one for one in history if one.summary is not None]):
        assert before.summary is not None
        assert after.summary is not None
        base, head = measure(gate, before.summary), measure(gate, after.summary)
        if math.isnan(base) or math.isnan(head) or base == head or abs(head - base) < least_share * base:
            continue
        found.append(Step(before, after, base, head, explain(compare_commits(before.summary, after.summary))))
    return found
