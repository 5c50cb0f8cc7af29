"""`memprof schema`: the JSON Schemas of what the verbs print with --json."""

from __future__ import annotations

import importlib
import json
from importlib.resources import files
from typing import Any

import click

from memprof.errors import UsageError

#: Stands in a schema's file for the keys of a table's row, which follow from its columns: ``module.NAME`` of these.
_TABLE = "$table"


@click.command(
    epilog="""\b
Examples:
  memprof schema diff
  memprof schema report | python -m json.tool"""
)
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON Schema of a verb's --json output, or the names of all schemas.

    Keys are only added within a version, and readers should ignore those that they do not know.
    """
    folder = files("memprof") / "schemas"
    names = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
    if name is None:
        print("\n".join(names))
    elif name in names:
        print(json.dumps(with_tables(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))), indent=1))
    else:
        raise UsageError(f"There is no schema {name!r}; the schemas are {', '.join(names)}.")


def with_tables(schema: Any) -> Any:
    """Returns a schema as its file has it, with the keys of each table's rows from the table's columns."""
    if isinstance(schema, list):
        return [with_tables(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if _TABLE in schema:
        from memprof.analysis.table import row_schema

        module, _, columns = schema[_TABLE].rpartition(".")
        found = row_schema(getattr(importlib.import_module(module), columns))
        return found | {key: one for key, one in schema.items() if key != _TABLE}
    return {key: with_tables(one) for key, one in schema.items()}
