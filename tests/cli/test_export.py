"""`memprof export`: files and folders for other tools, written whole, and never over anything else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.trace.manifest import Manifest
from memprof.trace.schema import TABLES
from memprof.trace.store import write_trace
from tests.building import Op, Storage, make_tables

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"


def run(*words: object, status: int = 0) -> None:
    assert main(["export", *map(str, words)]) == status


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two ranks, with 100 and 200 bytes."""
    path = tmp_path_factory.mktemp("ranks") / "run.memprof"
    processes = [
        (Manifest(rank=rank, world_size=2), make_tables([[Op(makes=["x"])]], [Storage("x", 100 * (1 + rank))]))
        for rank in range(2)
    ]
    write_trace(path, processes)
    return path


@pytest.mark.parametrize("kind", ["perfetto", "speedscope", "csv", "parquet", "snapshot"])
def test_every_format_is_written_and_replaces_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing files stay unless -f is given, and no temporary file is left; a second export gives the same bytes."""
    path = tmp_path / "out"
    run(SAMPLE, "--to", kind, "-o", path)
    assert f"wrote {path} (" in capsys.readouterr().err

    def content() -> dict[str, bytes]:
        return {str(one): one.read_bytes() for one in [path, *path.rglob("*")] if one.is_file()}

    before = content()
    assert before
    run(SAMPLE, "--to", kind, "-o", path, status=2)
    assert "exists already" in capsys.readouterr().err
    run(SAMPLE, "--to", kind, "-o", path, "-f")
    assert content() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    """The same events, packed, and the same bytes each time."""
    run(SAMPLE, "--to", "perfetto", "-o", tmp_path / "a.json")
    for name in ("b.json.gz", "c.json.gz"):
        run(SAMPLE, "--to", "perfetto", "-o", tmp_path / name)
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    assert (tmp_path / "b.json.gz").read_bytes() == (tmp_path / "c.json.gz").read_bytes()


def test_ranks(ranks: Path, tmp_path: Path) -> None:
    """By default all ranks, as processes or folders; with --rank one."""
    run(ranks, "--to", "perfetto", "-o", tmp_path / "all.json")
    run(ranks, "--to", "perfetto", "--rank", 1, "-o", tmp_path / "one.json")
    counted = {
        name: [
            event["args"]["bytes"]
            for event in json.loads((tmp_path / name).read_text())["traceEvents"]
            if event["ph"] == "C" and event["name"] == "allocated"
        ]
        for name in ("all.json", "one.json")
    }
    assert counted == {"all.json": [100, 200], "one.json": [200]}
    run(ranks, "--to", "csv", "-o", tmp_path / "all")
    run(ranks, "--to", "csv", "--rank", 1, "-o", tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir()) == ["rank0", "rank1"]
    assert len(list((tmp_path / "one").glob("*.csv"))) == len(TABLES)
    run(ranks, "--to", "speedscope", "--rank", 1, "-o", tmp_path / "stacks.json")
    stacks = json.loads((tmp_path / "stacks.json").read_text())
    assert [profile["endValue"] for profile in stacks["profiles"]] == [200, 200]
    assert "rank 1" in stacks["name"]
    run(ranks, "--to", "csv", "--rank", 7, "-o", tmp_path / "none", status=2)
    assert not (tmp_path / "none").exists()


def test_some_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are named; a misspelt one writes nothing."""
    run(SAMPLE, "--to", "parquet", "--tables", "ops, storages", "-o", tmp_path / "some")
    assert {path.name for path in (tmp_path / "some").iterdir()} == {
        "ops.parquet", "storages.parquet", "tables.json", "README.txt",
    }  # fmt: skip
    run(SAMPLE, "--to", "parquet", "--tables", "opps", "-o", tmp_path / "none", status=2)
    assert "did you mean ops?" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even with -f: only tables that were exported before are."""
    (tmp_path / "thesis.tex").write_text("years of work")
    run(SAMPLE, "--to", "csv", "-o", tmp_path, "-f", status=2)
    assert "contains files other than exported tables" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "csv", "--at", "3", "-o", "x"], "--at is for --to speedscope"),
        (["--to", "perfetto", "--tables", "ops", "-o", "x"], "--tables is for --to csv and parquet"),
        (["--to", "snapshot", "--lives", "3", "-o", "x"], "--lives is for --to perfetto"),
        (["--to", "snapshot", "-o", "nowhere/x"], "no folder nowhere"),
        (["--to", "snapshot", "-o", "folder"], "is a folder, but this format is one file"),
        (["--to", "csv", "-o", "file"], "is a file, but this format is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with exit code 2 and a message, before anything is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    run("not-there.memprof", *words, status=2)
    assert sentence in capsys.readouterr().err


def test_a_damaged_recording_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 5, and no file, half file or folder."""
    (tmp_path / "bad.memprof").write_bytes(SAMPLE.read_bytes()[:-2000])
    for kind in ("perfetto", "speedscope", "csv", "parquet", "snapshot"):
        run(tmp_path / "bad.memprof", "--to", kind, "-o", tmp_path / kind, status=5)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.memprof"]
