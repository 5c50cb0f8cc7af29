"""`memprof schema`: the JSON Schemas of what the verbs print with --json."""

from __future__ import annotations

from importlib.resources import files

import click

from memprof.errors import UsageError


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
        print((folder / f"{name}.json").read_text(encoding="utf-8"), end="")
    else:
        raise UsageError(f"There is no schema {name!r}; the schemas are {', '.join(names)}.")
