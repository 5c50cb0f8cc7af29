"""Reads and writes plans as TOML files: one table per policy, the prediction, and the budget.

Plans are read with Python's own parser, so that the job's Python needs no dependencies, and written with tomlkit, which
preserves manual edits. Reading executes nothing: a table names a policy of ``registry.policy_types``, its keys are that
policy's settings.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import BadInputError, OutputError, PolicyError
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import (
    AT_BATCH,
    AT_LENGTH,
    BUDGET,
    NUMERICS_IN_WORDS,
    PREDICTION,
    SOURCES_IN_WORDS,
    Place,
    plan_from_tables,
    settings_of,
)
from memprof.policies.plan.prediction import Prediction
from memprof.trace.files.reading import TOML_LIMIT_BYTES, parse_toml, read_text
from memprof.trace.files.whole_file import whole_file
from memprof.units import format_bytes

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Integer, Table


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan.

    Raises:
        BadInputError: The file does not exist, cannot be read, or is not TOML.
        PolicyError: A table, a key or a value in it is invalid.
    """
    path = Path(path)
    try:
        text = read_text(path, TOML_LIMIT_BYTES)
    except FileNotFoundError:
        raise BadInputError(
            f"plan {path} does not exist; write one: memprof suggest RUN --budget 8GiB --write {path}"
        ) from None
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}.") from None
    return parse_plan(text, str(path))


def parse_plan(text: str, name: str = "the plan") -> Plan:
    """Reads a plan from its text.

    Raises:
        BadInputError: It is not TOML, too long, or nests too deeply.
        PolicyError: A table, a key or a value in it is invalid.
    """
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise BadInputError(f"{name} {error}.") from None
    return plan_from_tables(tables, Place(name, text))


def format_plan(plan: Plan, before: str = "") -> str:
    """Formats a plan as TOML, with comments that describe each policy and the source of the prediction.

    Args:
        plan: The plan.
        before: TOML of the same policies, whose lines and comments are kept; only the prediction is replaced, and the
            budget if it differs.
    """
    import tomlkit

    kept = _document_kept(plan, before) if before else None
    is_kept = kept is not None
    document = _document_of(plan) if kept is None else kept
    if plan.prediction is not None:
        if document.body:
            document.add(tomlkit.nl())
        document.add(PREDICTION, _prediction_table(plan.prediction))
    # tomlkit adds an extra line after an array of tables.
    text = tomlkit.dumps(document)
    return text.lstrip("\n") if is_kept else re.sub(r"\n{3,}", "\n\n", text)


def write_plan(path: str | os.PathLike[str], plan: Plan, before: str = "") -> None:
    """Writes a plan to a file atomically.

    Args:
        path: The file to write or replace.
        plan: The plan.
        before: See ``format_plan``.

    Raises:
        BadInputError: The file cannot be written.
    """
    path = Path(path)
    try:
        with whole_file(path) as file:
            file.write(format_plan(plan, before).encode())
    except OutputError as error:
        raise BadInputError(f"{path} cannot be written: {error.reason}.") from None


def _document_of(plan: Plan) -> TOMLDocument:
    import tomlkit

    document = tomlkit.document()
    if plan.budget_bytes is not None:
        document.add(BUDGET, _budget_item(plan.budget_bytes))
    for name, size in _sizes(plan).items():
        document.add(name, tomlkit.item(size))
    if not plan.policies:
        document.add(tomlkit.comment("a plan without policies: the job as it is"))
    counts: dict[str, int] = {}
    for policy in plan.policies:
        counts[policy.name] = counts.get(policy.name, 0) + 1
    arrays: dict[str, Any] = {}
    for policy in plan.policies:
        if document.body:
            document.add(tomlkit.nl())
        table = tomlkit.table()
        for line in _comments(plan, policy):
            table.add(tomlkit.comment(line))
        for name, value in settings_of(policy).items():
            table.add(name, value)
        if counts[policy.name] == 1:
            document.add(policy.name, table)
        elif policy.name in arrays:
            arrays[policy.name].append(table)
        else:
            arrays[policy.name] = tomlkit.aot()
            arrays[policy.name].append(table)
            document.add(policy.name, arrays[policy.name])
    return document


def _comments(plan: Plan, policy: Policy) -> list[str]:
    changes = () if plan.prediction is None else plan.prediction.changes
    own = [_one_line(text).removeprefix(f"{policy.name}: ") for text in changes if text.startswith(f"{policy.name}: ")]
    word = plan.numerics_of(policy)
    return [_one_line(policy.describe()), *([NUMERICS_IN_WORDS[word]] if word != "none" else []), *own]


def _document_kept(plan: Plan, before: str) -> TOMLDocument | None:
    """Returns an existing document without its prediction; None where it has other policies."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        written = parse_plan(before)
        if written.policies != plan.policies:
            return None
        document = tomlkit.parse(before)
        document.pop(PREDICTION, None)
        above = ""
        if plan.budget_bytes != written.budget_bytes:
            if plan.budget_bytes is None:
                document.pop(BUDGET)
            elif BUDGET in document:
                document[BUDGET] = _budget_item(plan.budget_bytes)
            else:
                above = f"{_document_of(Plan(budget_bytes=plan.budget_bytes)).as_string().splitlines()[0]}\n\n"
        sizes = _sizes(plan)
        for name in _sizes(written).keys() - sizes.keys():
            document.pop(name)
        for name, size in sizes.items():
            if name in document:
                document[name] = size
            else:
                above = f"{name} = {size}\n{above or chr(10)}"
        # Otherwise the blank lines before the prediction would grow by one each time.
        kept = f"{above}{tomlkit.dumps(document)}".rstrip("\n")
        return tomlkit.parse(f"{kept}\n") if kept else tomlkit.document()
    except (BadInputError, PolicyError, TOMLKitError):
        return None


def _sizes(plan: Plan) -> dict[str, int]:
    """Returns the size that a plan is for, by its key; none for that of the recording."""
    sizes = {AT_BATCH: plan.at_batch, AT_LENGTH: plan.at_length}
    return {name: size for name, size in sizes.items() if size is not None}


def _budget_item(budget_bytes: int) -> Integer:
    import tomlkit

    item = tomlkit.item(budget_bytes)
    item.comment(format_bytes(budget_bytes))
    item.trivia.comment_ws = "  "
    return item


def _prediction_table(prediction: Prediction) -> Table:
    import tomlkit

    table = tomlkit.table()
    words = SOURCES_IN_WORDS.get(prediction.how, prediction.how)
    table.add(tomlkit.comment(f"made by memprof predict from {_one_line(prediction.trace) or 'a recording'}"))
    table.add(tomlkit.comment(f"{words}; bytes and microseconds"))
    for name, value in vars(prediction).items():
        if not isinstance(value, dict) and (name != "changes" or value):
            table.add(name, list(value) if isinstance(value, tuple) else value)
    for name, comment in (
        ("phases", "most bytes in each phase"),
        ("categories", "bytes at the peak"),
    ):
        inner = tomlkit.table()
        inner.add(tomlkit.comment(comment))
        for key, count in getattr(prediction, name).items():
            inner.add(key, count)
        table.add(name, inner)
    return table


def _one_line(text: str) -> str:
    """Removes characters that a TOML comment cannot contain."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
