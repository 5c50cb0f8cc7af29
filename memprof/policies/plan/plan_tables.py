"""A plan as plain tables, as in TOML and JSON, and where a mistake in a plan file is."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memprof.errors import PolicyError, UsageError
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction
from memprof.policies.registry import policy_type, policy_types
from memprof.units import parse_bytes

#: The table that is not a policy.
PREDICTION = "prediction"
#: The key outside all tables.
BUDGET = "budget"
#: The keys of the size a plan is for, if it differs from the recording's.
AT_BATCH, AT_LENGTH = "at_batch", "at_length"
_ABOVE = (BUDGET, AT_BATCH, AT_LENGTH)
#: Effect of policies on the job's numbers, in words; none for policies that leave them unchanged.
NUMERICS_IN_WORDS = {
    "none": "numerics bit-identical",
    "rounding": "numerics differ by rounding",
    "approximate": "numerics approximate",
    "different": "numerics differ",
}
#: How a prediction was obtained, in words.
SOURCES_IN_WORDS = {
    "replayed": "replayed: every operator and storage of the recording replayed",
    "modelled": "modelled: operators and storages replayed, with sizes or times from a model of the policy",
    "dry-run": "dry-run: the job ran under it on tensors without memory; times modelled",
    "rule": "estimated by a rule of thumb",
    "measured": "measured in an earlier run",
}


def plan_from_tables(tables: Mapping[str, Any], place: Place | None = None) -> Plan:
    """Creates a plan from the tables of ``plan_to_tables`` or of a TOML file.

    Raises:
        PolicyError: A table, a key or a value in it is invalid.
    """
    place = place or Place("the plan", "")
    policies: list[Policy] = []
    prediction, budget_bytes = None, None
    sizes: dict[str, int] = {}
    for name, content in tables.items():
        if name == PREDICTION:
            prediction = _read_prediction(content, place)
            continue
        if name == BUDGET:
            budget_bytes = _read_budget(content, place)
            continue
        if name in (AT_BATCH, AT_LENGTH):
            sizes[name] = _read_size(name, content, place)
            continue
        kind = policy_type(name)
        if kind is None:
            known = [kind.name for kind in policy_types()] + [PREDICTION, *_ABOVE]
            what = f"policy {name!r}" if isinstance(content, dict | list) else f"key {name!r} outside of its tables"
            raise PolicyError(f"{place.at(name)}: a plan has no {what}; {_nearest(name, known)}")
        for number, settings in enumerate(content if isinstance(content, list) else [content]):
            policies.append(_read_policy(kind, settings, place.inside(name, number)))
    return Plan(tuple(policies), prediction, budget_bytes, sizes.get(AT_BATCH), sizes.get(AT_LENGTH))


def plan_to_tables(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain dicts and lists, as in TOML and JSON."""
    above = ((BUDGET, plan.budget_bytes), (AT_BATCH, plan.at_batch), (AT_LENGTH, plan.at_length))
    tables: dict[str, Any] = {name: value for name, value in above if value is not None}
    for policy in plan.policies:
        settings = settings_of(policy)
        if policy.name not in tables:
            tables[policy.name] = settings
        elif isinstance(tables[policy.name], list):
            tables[policy.name].append(settings)
        else:
            tables[policy.name] = [tables[policy.name], settings]
    if plan.prediction is not None:
        tables[PREDICTION] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(plan.prediction).items()
            if name not in ("machine", "changes") or value
        }
    return tables


def policy_tables(tables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns only the policies' tables of a ``plan_to_tables`` result; empty without a plan."""
    return {name: content for name, content in (tables or {}).items() if name not in (PREDICTION, *_ABOVE)}


def _read_budget(content: Any, place: Place) -> int:
    wanted = f'{place.at(BUDGET)}: {BUDGET} must be a size such as "24GiB", or a number of bytes'
    if isinstance(content, str):
        try:
            content = parse_bytes(content)
        except UsageError as error:
            raise PolicyError(f"{wanted}: {error}.") from None
    if type(content) is not int or not 0 < content < 2**63:
        raise PolicyError(f"{wanted}, not {_shown(content)}.")
    return content


def _read_size(name: str, content: Any, place: Place) -> int:
    if type(content) is not int or not 0 < content < 2**63:
        raise PolicyError(f"{place.at(name)}: {name} must be a whole number above 0, not {_shown(content)}.")
    return content


def _read_policy(kind: type[Policy], settings: Any, place: Place) -> Policy:
    if not isinstance(settings, dict):
        raise PolicyError(f"{place.at()}: {kind.name} must be a table: write [{kind.name}] and its settings below it.")
    try:
        return kind(**_checked(kind, settings, place, f"[{kind.name}]"))
    except PolicyError as error:
        if place.is_named_in(str(error)):
            raise
        raise PolicyError(f"{place.at()}: {error}") from None


def _read_prediction(content: Any, place: Place) -> Prediction:
    place = place.inside(PREDICTION, 0)
    if not isinstance(content, dict):
        raise PolicyError(f"{place.at()}: {PREDICTION} must be a table: write [{PREDICTION}] and its keys below it.")
    values = _checked(Prediction, content, place, f"[{PREDICTION}]")
    no_default = dataclasses.MISSING
    required = [
        field.name
        for field in dataclasses.fields(Prediction)
        if field.default is no_default and field.default_factory is no_default
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise PolicyError(
            f"{place.at()}: [{PREDICTION}] lacks {', '.join(missing)}. Leave the table out, or have it written: "
            "memprof predict RUN --plan PLAN --write PLAN"
        )
    return Prediction(**values)


def _checked(kind: type, settings: Mapping[str, Any], place: Place, title: str) -> dict[str, Any]:
    """Returns settings as their fields' types.

    Raises:
        PolicyError: A key is unknown, or a value of another type.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    values = {}
    for key, value in settings.items():
        if key in _ABOVE and key not in names:
            raise PolicyError(f"{place.at(key)}: {key} is not a setting of {title}; write it above the first table.")
        if key not in names:
            raise PolicyError(f"{place.at(key)}: {title} has no setting {key!r}; {_nearest(key, names)}")
        try:
            values[key] = _typed(value, hints[key])
        except TypeError as error:
            raise PolicyError(f"{place.at(key)}: {key} in {title} must be {error}, not {_shown(value)}.") from None
    return values


def _typed(value: Any, kind: Any) -> Any:
    """Returns a TOML value as a setting's type; TypeError says which type that is."""
    if typing.get_origin(kind) is tuple:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        raise TypeError("a list of strings")
    if typing.get_origin(kind) is dict:
        if isinstance(value, dict) and all(type(number) is int for number in value.values()):
            return dict(value)
        raise TypeError("a table of whole numbers")
    if kind is float and type(value) is int:
        return float(value)
    # In Python, bool is a subclass of int.
    if type(value) is not kind:
        raise TypeError({str: "a string", bool: "true or false", int: "a whole number", float: "a number"}[kind])
    return value


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."


def settings_of(policy: Policy) -> dict[str, Any]:
    """Returns the settings that differ from their defaults; the first setting if none does, to avoid an empty table."""
    fields = dataclasses.fields(policy)  # type: ignore[arg-type]  # every policy is a dataclass
    values = {field.name: getattr(policy, field.name) for field in fields}
    changed = {field.name: values[field.name] for field in fields if values[field.name] != field.default}
    chosen = changed or dict(list(values.items())[:1])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}


@dataclass(frozen=True)
class Place:
    """A place in a plan file that is being read.

    Attributes:
        name: The file.
        text: Its text, "" where there is none.
        table: The current table, "" for the top level.
        number: Which of the tables of that name, 0 first.
    """

    name: str
    text: str
    table: str = ""
    number: int = 0

    def inside(self, table: str, number: int) -> Place:
        """Returns the place of a table's content."""
        return replace(self, table=table, number=number)

    def at(self, key: str = "") -> str:
        """Names the file and the line of a key, or of the table itself."""
        line = self._line(key)
        return f"{self.name}, line {line}" if line else self.name

    def is_named_in(self, sentence: str) -> bool:
        """Whether a message already names the place of the mistake."""
        return sentence.startswith((f"{self.name}, line", f"{self.name}: "))

    def _line(self, key: str) -> int:
        lines = self.text.splitlines()
        start = 0
        if self.table or key:
            word = re.escape(self.table or key)
            header = re.compile(rf"""\s*(?:\[\[?\s*["']?{word}["']?\s*[\].]|["']?{word}["']?\s*[=.])""")
            found = [number for number, line in enumerate(lines) if header.match(line)]
            if not found:
                return 0
            start = found[min(self.number, len(found) - 1)]
        if self.table and key:
            setting = re.compile(rf"""(?:.*[\s{{,.])?["']?{re.escape(key)}["']?\s*[=.\]]""")
            return next((number + 1 for number in range(start, len(lines)) if setting.match(lines[number])), start + 1)
        return start + 1
