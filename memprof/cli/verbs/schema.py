"""`memprof schema`: the JSON Schemas of what the verbs print with --json."""

from __future__ import annotations

import importlib
import json
from importlib.resources import files
from typing import Any

import click

from memprof.errors import UsageError
from memprof.harmless import notify
from memprof.json_values import fields_schema

#: Stands in a schema's file for keys that follow from what it names: a table's columns, or the fields of a dataclass.
_KEYS_OF = "$keys_of"
#: Former names of schemas, which are found for one release.
_FORMER = {
    "summary": "export-summary",
    "check": "diff-check",
    "planners": "suggest-compare-planners",
    "bisect": "history-bisect",
    "compare-allocations": "diff-allocations",
}


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
    if name in _FORMER:
        notify(f"schema {name} is now memprof schema {_FORMER[name]}; the old name is deprecated")
        name = _FORMER[name]
    if name is None:
        print("\n".join(names))
    elif name in names:
        print(json.dumps(whole_schema(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))), indent=1))
    else:
        raise UsageError(f"no schema {name!r}; the schemas are {', '.join(names)}.")


def whole_schema(schema: Any) -> Any:
    """Returns a schema as its file has it, with the keys of tables and dataclasses, which are always there.

    Of the keys that the file adds to these, ``required`` lists those that are; without it all are.
    """
    if isinstance(schema, list):
        return [whole_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: whole_schema(one) for key, one in schema.items() if key != _KEYS_OF}
    if _KEYS_OF not in schema:
        return found
    from memprof.analysis.table import row_schema

    module, _, name = schema[_KEYS_OF].rpartition(".")
    named = getattr(importlib.import_module(module), name)
    keys = fields_schema(named) if isinstance(named, type) else row_schema(named)
    more = found.get("properties", {})
    properties, required = keys["properties"] | more, [*keys["required"], *found.get("required", more)]
    return keys | found | {"properties": properties, "required": list(dict.fromkeys(required))}
