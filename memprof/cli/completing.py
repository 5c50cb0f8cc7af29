"""Shell completion of recordings, devices, policies and planners."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from memprof.errors import UsageError

#: The variable that carries the shell's completion request (click's own protocol).
VARIABLE = "_MEMPROF_COMPLETE"

Offer = Callable[[str], list[CompletionItem[str]]]

#: Metavariables that stand for recordings in the verbs' help.
_RECORDINGS = ("TRACE", "TRACE...", "RUN", "[BASE] HEAD", "[RUN] HEAD")
_ENDINGS = (".memprof", ".spool")
#: What can be compared with a recording: a summary, and a GPU's memory snapshot.
_COMPARED = (*_ENDINGS, ".json", ".pickle")


class Offering(click.ParamType[Any]):
    """A parameter type that wraps another one and completes its values.

    Attributes:
        name: The name of the wrapped type.
    """

    def __init__(self, kind: click.ParamType[Any], offer: Offer) -> None:
        """Stores the wrapped type and the function that completes its values."""
        self.name = kind.name
        self._kind, self._offer = kind, offer

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts a value as the wrapped type does."""
        return self._kind.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Completes values that begin with what is typed."""
        return self._offer(incomplete)


def offer_values(command: click.Command) -> None:
    """Makes a verb's parameters complete values. Called on a completion request only, never when the verb runs."""
    for param in command.params:
        offer = _offer_of(param)
        if offer is not None:
            param.type = Offering(param.type, offer)


def _offer_of(param: click.Parameter) -> Offer | None:
    if isinstance(param, click.Argument) and param.name == "words":
        return lambda typed: [CompletionItem(typed, type="file")]
    if param.metavar in _RECORDINGS:
        return partial(_recordings, _COMPARED if param.metavar == "[BASE] HEAD" else _ENDINGS)
    simple: dict[str, Offer] = {
        "--planner": _words(_planners),
        "--allow": _words(_policies),
        "--forbid": _words(_policies),
        "--tables": _listed(_tables),
    }
    for option in param.opts:
        if option in simple:
            return simple[option]
        if option == "--device" and param.metavar == "NAME":
            return _words(_cards if param.name == "device" else _machines)
    return _policy_offer(param)


def _policy_offer(param: click.Parameter) -> Offer | None:
    """Returns the completion of a policy's flag; another option of the same name gets none."""
    from memprof.policies.registry import policy_type

    kind = policy_type(param.name or "")
    if kind is None or param.metavar != kind.flag_example:
        return None
    words = kind.flag_words or (kind.flag_example.strip("'"),)
    return _listed(lambda: list(words)) if kind.flag_is_list else _words(lambda: list(words))


def _words(names: Callable[[], list[str]]) -> Offer:
    return lambda typed: [CompletionItem(name) for name in names() if name.startswith(typed)]


def _listed(names: Callable[[], list[str]]) -> Offer:
    """Returns the completion of a comma-separated list of words."""

    def offer(typed: str) -> list[CompletionItem[str]]:
        before, comma, last = typed.rpartition(",")
        used = before.split(",")
        return [CompletionItem(before + comma + name) for name in names() if name.startswith(last) and name not in used]

    return offer


def _recordings(endings: tuple[str, ...], typed: str) -> list[CompletionItem[str]]:
    """Completes files and spool folders of some endings, and folders to descend into; hidden ones only if typed."""
    folder, slash, name = typed.rpartition("/")
    before = folder + slash
    try:
        entries = sorted(Path(before).expanduser().iterdir())
    except (OSError, RuntimeError):  # no such folder, or no such user: nothing to complete
        return []
    fits = [entry for entry in entries if entry.name.startswith(name) and (name or not entry.name.startswith("."))]
    found = [entry for entry in fits if entry.name.endswith(endings)]
    if os.environ.get(VARIABLE, "").startswith("bash"):
        # bash completes either words or file names; its script marks these as file names (`completion.py`).
        found = [entry for entry in fits if entry in found or entry.is_dir()]
        return [CompletionItem(before + entry.name) for entry in found]
    return [*(CompletionItem(before + entry.name) for entry in found), CompletionItem(typed, type="dir")]


def _machines() -> list[str]:
    from memprof.machines.catalogue import accelerators

    return [one.name.lower().replace(" ", "-") for one in accelerators()]


def _cards() -> list[str]:
    from memprof.machines.card import find_card

    names = []
    for name in _machines():
        try:
            find_card(name)
        except UsageError:  # a device that a dry run cannot simulate
            continue
        names.append(name)
    return names


def _planners() -> list[str]:
    from memprof.planners.base import planner_types

    return [kind.name for kind in planner_types()]


def _policies() -> list[str]:
    from memprof.policies.registry import policy_types

    return [kind.name for kind in policy_types()]


def _tables() -> list[str]:
    from memprof.trace.schema import TABLES

    return [kind.table_name for kind in TABLES]
