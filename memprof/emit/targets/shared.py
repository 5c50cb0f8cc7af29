"""Common code of the targets that are configured by arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memprof.emit.code.model_code import PlanCode, plan_code
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint

_LIST_OF_LAYERS = re.compile(r"[^*?\[\]]+\.\*")


@dataclass
class Sorted:
    """A plan's policies, sorted by how a framework supports them.

    Attributes:
        arguments: Arguments of the framework, by name.
        model: Policies applied as code around the model.
        cannot: Unsupported parts, one sentence each.
        notes: What differs, or is left to the reader.
        expressed: Policies expressed as arguments.
        switches: Names of what is expressed inside another policy's arguments.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    model: list[Policy] = field(default_factory=list)
    cannot: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    expressed: int = 0
    switches: set[str] = field(default_factory=set)

    def take(self, arguments: Mapping[str, Any], note: str = "") -> None:
        """Expresses a policy as arguments."""
        self.arguments.update(arguments)
        self.notes += [note] if note else []
        self.expressed += 1

    def leave(self, policy: Policy, reason: str) -> None:
        """Records a policy as unsupported."""
        self.cannot.append(f"{policy.describe()}: {reason}")

    def model_code(self) -> PlanCode:
        """Returns the code around the model, without access to the optimizer."""
        return plan_code(self.model, has_optimizer=False)


def is_every_layer(policies: Iterable[Policy]) -> bool:
    """Returns whether a plan recomputes the layers of one list and nothing else: ``layers.*``."""
    found = [each for each in policies if isinstance(each, Checkpoint)]
    return (
        len(found) == 1
        and not found[0].keep
        and not found[0].segments
        and len(found[0].modules) == 1
        and _LIST_OF_LAYERS.fullmatch(found[0].modules[0]) is not None
    )


def goes_around_model(policy: Policy) -> bool:
    """Returns whether a policy needs only the model, so that it can be applied before the framework wraps it."""
    return not (policy.changes_update or policy.frameworks_set_it)


def dictionary(arguments: Mapping[str, Any], values: Mapping[str, str] | None = None) -> str:
    """Formats arguments as a Python dict, one per line.

    Args:
        arguments: Numbers, strings, booleans, None and dicts of these, by name.
        values: Python source to use for some of the values, by name.
    """
    lines = [f'    "{name}": {_literal(value)},' for name, value in arguments.items() if name not in (values or {})]
    lines += [f'    "{name}": {text},' for name, text in (values or {}).items()]
    return "\n".join(("{", *lines, "}"))


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return repr(value)
