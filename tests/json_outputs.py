"""Every ``--json`` output, made by commands on the samples, and the schemas in memprof/schemas that describe them.

``python -m tests.json_outputs [NAME...]`` adds to the schemas what the outputs hold and they lack;
what a schema allows already is kept, so that it can be widened by hand. ``{"$keys_of": "module.NAME"}`` stands for
the keys of a row of a table, or of a dataclass: `memprof schema` writes them from the columns or fields of that name.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from docs.building.workshop import Workshop
from docs.building.workshop import run as run_command
from memprof.cli.main import main
from memprof.cli.verbs.schema import whole_schema
from memprof.trace.schema import TABLES
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.writing import BACKWARD, FORWARD, MIB, block, entry, segment, snapshot, write

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "memprof" / "schemas"
#: Objects that are tables, by their key: names of things in a job to values of one kind; 2 for tables of tables.
_TABLES = dict.fromkeys(
    ("by_category", "phases", "categories", "frame", "spots", "maxima", "rank_peaks", "lines", "modules", "parameters",
     "held", "outside"), 1) | dict.fromkeys(("parts", "dtypes", "operators"), 2)  # fmt: skip
_SAMPLES = ROOT / "sample_traces"
_GPT, _LSTM, _RESNET = (str(_SAMPLES / name / "run.memprof") for name in ("gpt", "lstm", "resnet"))

#: Commands that make files which others read, then the outputs of each schema; status codes 0, 3 and 4 have outputs.
FILES = (
    ("predict", _GPT, "--precision", "bf16", "--write", "plan.toml"),
    ("export", _GPT, "--to", "snapshot", "-o", "snapshot.pickle"),
    ("export", _GPT, "--to", "summary", "-o", "memory.json"),
    ("import", "full.pickle", "-o", "full.memprof"),
    ("import", "end.pickle", "-o", "end.memprof"),
)
#: Snapshots of a device that ran out of memory in backward, and of what was in use at one moment.
_IMPORTED = ("full.memprof", "end.memprof")
#: A recording of three ranks, the last of which recorded nothing.
_RANKS = "ranks.memprof"
OUTPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "report": tuple(("report", one, "--json") for one in (_GPT, _LSTM, _RESNET, *_IMPORTED, _RANKS)),
    "report-allocator": tuple(("report", one, "--allocator", "--json") for one in (_GPT, "full.memprof", _RANKS)),
    "report-static": tuple(("report", one, "--static", "--json") for one in (_GPT, _RANKS)),
    "report-leaks": (
        *(("report", one, "--leaks", "--json") for one in (_GPT, *_IMPORTED, _RANKS)),
        ("report", _GPT, _GPT, _GPT, "--leaks", "--json"),
        ("report", *_IMPORTED, "end.memprof", "--leaks", "--json"),
    ),
    "report-ranks": tuple(("report", one, "--by", "rank", "--json") for one in (_GPT, _RANKS)),
    "export-summary": tuple(("export", one, "--to", "summary") for one in (_GPT, _LSTM, "end.memprof", _RANKS)),
    "diff-check": (
        *(("diff", one, "--budget", "1GiB", "--json") for one in (_GPT, "end.memprof", _RANKS)),
        ("diff", _GPT, "--fail-on", "growth>0", "--json"),
    ),
    "diff": (
        ("diff", _GPT, _GPT, "--fail-on", "peak>+2%", "--format", "json"),
        ("diff", "memory.json", _GPT, "--format", "json"),
        ("diff", "end.memprof", "end.memprof", "--format", "json"),
    ),
    "predict": (("predict", _GPT, "--checkpoint", "*", "--json"), ("predict", _RANKS, "--precision", "bf16", "--json")),
    "verify": (("verify", "plan.toml", _GPT, _GPT, "--json"), ("verify", "plan.toml", _GPT, "--json")),
    "estimate": (
        ("estimate", "gpt3-175b", "--checkpoint", "layers", "--zero", "3", "--ranks", "64", "--json"),
        ("estimate", "--mlp", "784,512,10", "--batch", "64", "--json"),
        ("estimate", "--transformer", "layers=2,width=64,heads=2,vocab=256", "--from", _GPT, "--json"),
    ),
    "attach-list": (("attach", "--list", "--json"),),
    "import": tuple(("import", f"{one}.pickle", "-f", "--json") for one in ("snapshot", "full", "end")),
}
#: Those that take long, or read what a job made: commands of the documentation's workshop (docs/building/workshop.py).
SLOW_OUTPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "suggest": (
        ("suggest", "run.memprof", "--budget", "60%", "--check", "1", "--json"),
        ("suggest", "run.memprof", "--budget", "1%", "--time-limit", "5", "--json"),
        ("suggest", "run.memprof", "--budget", "100%", "--json"),
        ("suggest", "snapshot.memprof", "--budget", "60%", "--json"),
        ("suggest", "snapshot.memprof", "--budget", "1%", "--json"),
    ),
    "devices": (("devices", "run.memprof", "--budget", "60%", "--json"),),
    "suggest-compare-planners": (("suggest", "run.memprof", "--compare-planners", "--time-limit", "0.1", "--json"),),
    "doctor": (("doctor", "--quick", "--json"),),
    "largest": (("largest", "batch8.memprof", "--also", "batch16.memprof", "--budget", "80MiB", "--json"),),
    "fit": (("fit", "--budget", "60%", "--json", "train.py"),),
    "data": (("data", "--json", "lab/zoo/gru_seq2seq.py"), ("data", "--device", "rtx4090", "--json", "train.py")),
    "attach": (),  # of a job that is running: tests/launch/test_attach.py
    "diff-allocations": (("diff", "--json", "gpu.pickle", "dry-run.pickle"),),
    "history-bisect": (("history", "--bisect", "HEAD~1..HEAD", "--json", "--", "train.py"),),
    "history": (("history", "--json", "--commits", "HEAD~2..HEAD", "train.py"),),
}


#: The key of an output's version, where it is not ``schema``.
VERSION_KEYS = {"export-summary": "memprof_summary"}
#: Titles that are not made of the name.
_TITLES = {"export-summary": "memprof export --to summary", "diff-check": "memprof diff TRACE --json"}


def make_files(folder: Path) -> None:
    """Makes what the commands read."""
    asked = {"action": "oom", "device_free": MIB, "size": 4 * MIB, "stream": 0, "frames": BACKWARD}
    history = [entry("alloc", 0, 2 * MIB, FORWARD), entry("alloc", 4 * MIB, MIB, BACKWARD), asked]
    alive = [segment(0, block(2 * MIB)), segment(4 * MIB, block(MIB))]
    write(folder / "full.pickle", snapshot(alive, history))
    write(folder / "end.pickle", snapshot(alive))
    sample = Trace.open(_GPT)
    tables = {kind: sample.table(kind) for kind in TABLES}
    manifests = [replace(sample.manifest, rank=rank, world_size=3, pid=rank + 1) for rank in range(3)]
    write_trace(folder / _RANKS, list(zip(manifests, (tables, tables, {}), strict=True)))
    for words in FILES:
        status, _ = run(words, folder)
        assert status == 0, words


def run(words: Iterable[str], folder: Path) -> tuple[int, str]:
    """Runs a command in this process and returns its exit code and output."""
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        status = main(list(words))
    return status, output.getvalue()


def values_of(name: str, folder: Path) -> list[Any]:
    """Returns the outputs of OUTPUTS of one name, with the files of `make_files` in a folder."""
    values = []
    for words in OUTPUTS[name]:
        status, output = run(words, folder)
        assert status in (0, 3, 4), (words, status, output)
        values.append(json.loads(output))
    return values


def slow_values(name: str, workshop: Workshop) -> list[Any]:
    """Returns the outputs of SLOW_OUTPUTS of one name."""
    values = []
    for words in SLOW_OUTPUTS[name]:
        folder = workshop.bench([words])
        if name.startswith("history"):
            _commit_batches(folder)
        done = run_command(["memprof", *words], folder)
        assert done.status in (0, 3, 4), (words, done)
        values.append(json.loads(done.output))
    return values


def _commit_batches(folder: Path) -> None:
    """Makes a repository of a folder, of three commits; the last one enlarges the batch."""
    job = (folder / "train.py").read_text(encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number, batch in enumerate((16, 16, 20)):
        text = job.replace("default=16", f"default={batch}") + f"# revision {number}\n"
        (folder / "train.py").write_text(text, encoding="utf-8")
        subprocess.run([*git, "add", "train.py"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", f"batch of {batch}"], check=True)


def read_schema(name: str) -> dict[str, Any]:
    """Returns a schema of the wheel, with the keys of its tables and dataclasses."""
    found: dict[str, Any] = whole_schema(_read_file(name))
    return found


def _read_file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def strict(schema: Any) -> Any:
    """Returns a schema that allows no key which it does not list, so that a new key needs a line in it."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(one) for key, one in schema.items()}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


def widened(schema: dict[str, Any] | None, values: list[Any], tables: int = 0) -> dict[str, Any]:
    """Returns a schema that allows values, and all that it allowed before.

    Args:
        schema: The schema; None for none yet.
        values: At least one value.
        tables: How many levels of objects are tables.
    """
    if "$keys_of" in (schema or {}):  # from the columns or fields that it names
        return dict(schema or {})
    is_new = schema is None
    found: dict[str, Any] = dict(schema or {})
    types = {_type_of(value) for value in values} | set(_listed(found.get("type", [])))
    if "number" in types:
        types.discard("integer")
    found["type"] = sorted(types) if len(types) > 1 else next(iter(types))
    objects = [value for value in values if isinstance(value, dict)]
    if objects and (tables or isinstance(found.get("additionalProperties"), dict)):
        inside = [one for value in objects for one in value.values()]
        if inside:
            found["additionalProperties"] = widened(found.get("additionalProperties"), inside, tables - 1)
    elif objects:
        known = found.get("properties", {})
        keys = list(dict.fromkeys([*known, *(key for value in objects for key in value)]))
        found["properties"] = {
            key: widened(known.get(key), inside, _TABLES.get(key, 0)) if (inside := _at(objects, key)) else known[key]
            for key in keys
        }
        everywhere = [key for key in keys if all(key in one for one in objects)]
        has_objects = not is_new and "properties" in (schema or {})
        found["required"] = [key for key in everywhere if not has_objects or key in (schema or {}).get("required", [])]
    entries = [one for value in values if isinstance(value, list) for one in value]
    if entries:
        found["items"] = widened(found.get("items"), entries)
    return found


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema in which a null may take the place of every value of an object, since any may be unknown.

    A key that is only seen with null allows anything.
    """
    found = dict(schema)
    for key in ("properties", "additionalProperties", "items"):
        inside = found.get(key)
        if not isinstance(inside, dict):
            continue
        if key == "properties":
            found[key] = {name: _or_null(nullable(one)) for name, one in inside.items()}
        else:
            found[key] = nullable(inside)
    return found


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    types = set(_listed(schema.get("type", []))) | {"null"}
    if types == {"null"}:
        return {key: one for key, one in schema.items() if key != "type"}
    return {**schema, "type": sorted(types)}


def _at(objects: list[dict[str, Any]], key: str) -> list[Any]:
    return [one[key] for one in objects if key in one]


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else kinds[type(value)]


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def _rewrite(names: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as shop:
        make_files(Path(scratch))
        workshop = Workshop(Path(shop))
        for name in names:
            values = slow_values(name, workshop) if name in SLOW_OUTPUTS else values_of(name, Path(scratch))
            path = SCHEMAS / f"{name}.json"
            key = VERSION_KEYS.get(name, "schema")
            body = nullable(widened(_read_file(name) if path.exists() else None, values))
            body["properties"][key] = {"const": values[0][key]}
            head = {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "$id": f"urn:memprof:json:{name}:{values[0][key]}",
                "title": _TITLES.get(name, f"memprof {name.replace('-', ' --', 1)} --json"),
            }
            path.write_text(json.dumps(head | body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _rewrite(sys.argv[1:] or (*OUTPUTS, *SLOW_OUTPUTS))
