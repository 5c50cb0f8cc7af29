"""Categories by the user's own patterns over the frames of allocation stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError, UsageError
from memprof.phases import is_own_name
from memprof.trace.files.reading import TOML_LIMIT_BYTES, parse_toml, read_text
from memprof.trace.schema import NONE, Ints, Texts
from memprof.trace.step import Step

#: How such a category was determined; shown, and not stored.
BY_PATTERN = "pattern"
#: More patterns than a person writes: each is matched with every frame.
_MOST_RULES = 100


def read_categories(path: Path) -> tuple[str, ...]:
    """Reads the file of ``--categories``: a table ``[categories]`` of patterns and the names of what they match.

    Returns:
        Rules for ``with_own_categories``, in their order.

    Raises:
        BadInputError: It is missing, not TOML, too long, or nests too deeply.
        UsageError: A key, a name or a pattern in it is invalid.
    """
    try:
        tables = parse_toml(read_text(path, TOML_LIMIT_BYTES))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadInputError(f"{path} {error}.") from None
    rules = tables.pop("categories", None)
    if tables:
        raise UsageError(f"{path} has the unknown key {next(iter(tables))!r:.80}: the only one is [categories].")
    if not isinstance(rules, dict) or not 0 < len(rules) <= _MOST_RULES:
        raise UsageError(
            f"{path} must have 1 to {_MOST_RULES} patterns below [categories], such as 'softmax\\.py' = \"softmax\"."
        )
    for pattern, name in rules.items():
        if not isinstance(name, str) or not is_own_name(name):
            raise UsageError(
                f"{path}: invalid name {name!r:.80} for {pattern!r:.80}: use at most 64 letters (A to Z), digits, "
                "spaces, '-', '_' and '.'."
            )
        _matches([""], pattern, str(path))
    return tuple(f"{name}={pattern}" for pattern, name in rules.items())


def with_own_categories(step: Step, rules: Sequence[str], earlier_stacks: Ints | None = None) -> Step:
    """Returns a step whose storages have the categories of the first rule that matches a frame of their stack.

    Args:
        step: The step.
        rules: Each a name, an equals sign, and a regular expression (RE2's syntax, which takes linear time) that is
            searched for in ``file:function`` of every frame.
        earlier_stacks: The step's ``Trace.earlier_stacks``; None where not known.

    Raises:
        UsageError: A pattern is not a regular expression.
    """
    if not rules:
        return step
    lines = [text.splitlines() or [""] for text in step.stacks.frames.tolist()]
    frames = {line: place for place, line in enumerate(dict.fromkeys(line for stack in lines for line in stack))}
    parts = [["", "", *line.rsplit(":", 2)] for line in frames]
    texts = [f"{file}:{function}" for *_, file, _, function in parts]
    inside = np.array([frames[line] for stack in lines for line in stack], dtype=np.int64)
    first = np.cumsum([0, *map(len, lines)])[:-1]
    named: Texts = np.full(len(lines) + 1, "", dtype=object)  # the last is that of no stack
    for name, _, pattern in (rule.partition("=") for rule in rules):
        hits = _matches(texts, pattern, "the recording")
        if lines:
            named[:-1][np.logical_or.reduceat(hits[inside], first) & (named[:-1] == "")] = name
    storages = step.storages
    made_by = np.append(step.ops.stack_id, NONE)[storages.created_op_id]
    own = named[
        made_by if earlier_stacks is None else np.where(storages.created_op_id == NONE, earlier_stacks, made_by)
    ]
    category = np.where(own == "", storages.category, own)
    source = np.where(own == "", storages.category_source, BY_PATTERN)
    return replace(step, storages=storages.replace(category=category, category_source=source))


def _matches(texts: list[str], pattern: str, where: str) -> Any:
    import pyarrow as pa
    from pyarrow import compute  # slow to import, and most reports have no patterns

    try:
        return compute.match_substring_regex(pa.array(texts, pa.string()), pattern=pattern).to_numpy(
            zero_copy_only=False
        )
    except (pa.ArrowInvalid, UnicodeEncodeError) as error:
        why = str(error).removeprefix("Invalid regular expression: ")
        raise UsageError(f"{where}: invalid pattern {pattern!r:.80}: {why:.80} (RE2's syntax).") from None
