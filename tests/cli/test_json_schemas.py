"""The JSON Schemas in the wheel: every --json output has one, and holds no key that it does not list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from docs.building.verbs import option_names
from docs.building.workshop import Workshop
from memprof.cli.main import VERBS, main
from tests.json_outputs import (
    OUTPUTS,
    SCHEMAS,
    SLOW_OUTPUTS,
    VERSION_KEYS,
    make_files,
    read_schema,
    slow_values,
    strict,
    values_of,
)

NAMES = sorted(path.stem for path in SCHEMAS.glob("*.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outputs")
    make_files(made)
    return made


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_match_their_schema(name: str, folder: Path) -> None:
    """Each output on the samples is valid, and has no key that the schema lacks."""
    validator = jsonschema.Draft202012Validator(strict(read_schema(name)))
    for value in values_of(name, folder):
        validator.validate(value)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_OUTPUTS)
def test_outputs_that_take_long_match_their_schema(name: str, workshop: Workshop) -> None:
    """Likewise for what searches, or runs a job."""
    validator = jsonschema.Draft202012Validator(strict(read_schema(name)))
    for value in slow_values(name, workshop):
        validator.validate(value)


def test_every_json_output_has_a_schema() -> None:
    """Each verb with --json, each page of report, and diff has a schema with a version; no schema is left over."""
    with_json = {verb for verb in VERBS if "--json" in option_names(verb)}
    assert {*with_json, "export"} == {name.partition("-")[0] for name in NAMES}
    assert set(NAMES) == {*OUTPUTS, *SLOW_OUTPUTS}
    for name in NAMES:
        schema = read_schema(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        version = VERSION_KEYS.get(name, "schema")
        assert schema["$id"] == f"urn:memprof:json:{name}:{schema['properties'][version]['const']}"
        assert version in schema["required"]


def test_schemas_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The names, one schema, and a sentence for an unknown one."""
    assert main(["schema"]) == 0
    assert capsys.readouterr().out.split() == NAMES
    assert main(["schema", "report"]) == 0
    assert json.loads(capsys.readouterr().out) == read_schema("report")
    assert main(["schema", "nothing"]) == 2
    assert re.search("no schema 'nothing'", capsys.readouterr().err)
