"""Plans, baselines and manifests with something wrong in them: a result or one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.diff.comparison import compare
from memprof.analysis.diff.summary import read_summary, summarise, summary_to_json
from memprof.errors import BadInputError
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, read_plan
from memprof.policies.registry import policy_types
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace
from tests.fuzz.limits import bounded_memory, outcome
from tests.fuzz.recordings import change_json

_SAMPLE = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"
_CASES = 900

_VALUES = (
    "1",
    "-1",
    "9" * 5_000,
    "0x" + "f" * 4_000,
    "1e400",
    "nan",
    "-inf",
    "true",
    '""',
    '"\\u0000"',
    '"\\u001b[2J"',
    '"a.*b["',
    "'**'",
    "[]",
    "[1, 'a', [2]]",
    "{}",
    "{a = {b = {c = 1}}}",
    "1979-05-27",
    "'" + "x" * 3_000 + "'",
    "[" * 2_000 + "]" * 2_000,
    "2",
    "'8GiB'",
    "'fsdp'",
)


def _plan_text(draw: random.Random) -> str:
    types = {kind.name: kind for kind in policy_types()}
    lines = []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*types, "prediction", "nobody", "a.b", '"\\u001b"'])
        lines.append(f"[[{name}]]" if draw.random() < 0.2 else f"[{name}]")
        fields = list(getattr(types.get(name), "__dataclass_fields__", {})) or ["key"]
        names = [*fields, "nokey", '""']
        lines += [f"{draw.choice(names)} = {draw.choice(_VALUES)}" for _ in range(draw.randint(0, 3))]
    text = draw.choice(["\n", "\r\n"]).join(lines)
    if draw.random() < 0.2:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(["\0", "\x1b", '"""', "]", "=", "\ud800", "\ufeff", "\r", "#"]) + text[place:]
    return draw.choice(["", "", "", "\ufeff"]) + text


def test_plans(tmp_path: Path) -> None:
    """Tables and keys that make no sense, numbers of 5,000 digits, nesting without end, other encodings."""
    path, outcomes = tmp_path / "plan.toml", []

    def read() -> None:
        plan: Plan = read_plan(path)
        format_plan(plan)
        plan.describe()

    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            text = _plan_text(draw)
            encoding = draw.choice(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1"])
            path.write_bytes(text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace"))
            outcomes.append(outcome(f"{seed}: {text[:300]!r}", read))
    assert outcomes.count("fine") < _CASES * 9 // 10


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(summary_to_json(summarise(Trace.open(_SAMPLE)))))
    return record


def _json_text(record: Any, draw: random.Random) -> str:
    text = json.dumps(record)
    how = draw.random()
    if how < 0.06:
        place = draw.randrange(len(text))
        return (
            text[:place] + draw.choice(["NaN", "\0", "\x1b", "[" * 50_000, "}", "1" * 5_000, "\ufeff"]) + text[place:]
        )
    if how < 0.09:
        return text[: draw.randrange(len(text))]
    if how < 0.11:
        return text.replace("{", '{"memprof_summary": 1, "memprof_summary": 1,', 1)
    return text


def test_baselines(baseline: dict[str, Any]) -> None:
    """Values of another kind, far too large, missing; doubled keys; what opens is compared with the original."""
    whole = read_summary(json.dumps(baseline), "whole")
    outcomes = []
    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            record: Any = baseline
            for _ in range(draw.randint(1, 3)):
                record = change_json(record, draw)
            text = _json_text(record, draw)
            outcomes.append(outcome(f"{seed}", lambda text=text: compare([whole], [read_summary(text, "memory.json")])))
    assert "fine" in outcomes
    assert outcomes.count("fine") < _CASES * 9 // 10


def test_manifests() -> None:
    """A manifest is read, or one clause says which key is wrong."""
    whole = Trace.open(_SAMPLE).manifest.to_json()

    def read(record: dict[str, Any]) -> None:
        try:
            Manifest.from_json(record)
        except TypeError as error:  # of which the reader of the file makes a sentence
            raise BadInputError(str(error)) from None

    outcomes = []
    for seed in range(_CASES):
        record = change_json(whole, random.Random(seed))
        if isinstance(record, dict):
            outcomes.append(outcome(f"{seed}", lambda record=record: read(record)))
    assert outcomes.count("fine") < len(outcomes) * 3 // 4
