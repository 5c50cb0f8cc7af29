"""Files that claim more than they hold are refused before memory is taken for it, and nothing is waited for."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memprof.errors import BadInputError
from memprof.trace.files import reading
from memprof.trace.files.archive import write_archive
from memprof.trace.files.columns import CorruptTableError
from memprof.trace.files.parquet import unpacked_bytes
from memprof.trace.files.reading import parse_json, parse_toml, read_bytes, read_text
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import Memory, Ops, Stacks, Table
from memprof.trace.store import Trace
from tests.building import read_table

#: Most memory that a refusal may take, interpreter and libraries included.
_MOST_BYTES = 1 << 30

_RUN = """
import sys
from pathlib import Path
from memprof.cli.main import main
status = main(sys.argv[1:])
lines = Path("/proc/self/status").read_text().splitlines()
print(status, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
"""


def refused(*words: str | Path) -> str:
    """Runs a verb in a process of its own, which must refuse within the memory; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, words)], capture_output=True, text=True, timeout=120, check=True
    )
    status, peak = done.stdout.split()[-2:]
    assert status == "5", done.stderr
    assert int(peak) < _MOST_BYTES
    assert done.stderr.count("\n") == 1, done.stderr
    assert "internal error" not in done.stderr
    return done.stderr


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **{"compression": "zstd", **options})
    return sink.getvalue().to_pybytes()


def letters(groups: int) -> bytes:
    """Makes a table of stacks of 20 MB of the same letter each, one at a time."""
    sink = pa.BufferOutputStream()
    schema = pa.schema([("stack_id", pa.int64()), ("frames", pa.string())])
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False, write_statistics=False) as writer:
        for row in range(groups):
            writer.write_table(pa.table({"stack_id": [row], "frames": ["x" * 20_000_000]}, schema=schema))
    return sink.getvalue().to_pybytes()


def recording(path: Path, tables: dict[type[Table], tuple[int, bytes]]) -> Path:
    entries = {f"rank0/{kind.table_name}.parquet": data for kind, (_, data) in tables.items()}
    rows = {f"rank0/{kind.table_name}.parquet": rows for kind, (rows, _) in tables.items()}
    top = {"schema_version": 1, "ranks": [0], "tables": rows}
    texts = {"rank0/manifest.json": json.dumps({"target": "train.py"}), "manifest.json": json.dumps(top)}
    write_archive(path, [*entries.items(), *((name, text.encode()) for name, text in texts.items())])
    return path


def test_rows_out_of_nothing_are_refused(tmp_path: Path) -> None:
    """Twenty million operators in a few kilobytes, which no recording has."""
    rows = 20_000_000
    data = parquet({"step": pa.nulls(rows, pa.int64())})
    assert len(data) < 100_000
    path = recording(tmp_path / "bomb.memprof", {Ops: (rows, data)})
    assert "of memory, which no recording of its size does" in refused("report", path)


def test_a_claim_is_refused_before_its_table_is_read(tmp_path: Path) -> None:
    """Opening compares the row counts of the manifest with the bytes that are there, and decodes nothing."""
    path = recording(tmp_path / "claims.memprof", {Ops: (20_000_000, b"no table at all")})
    with pytest.raises(BadInputError, match=r"its tables claim .* of memory, which no recording of its size does"):
        Trace.open(path)


def test_a_text_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    """Stacks of 400 MB of the same letter, in a few kilobytes."""
    data = letters(20)
    assert len(data) < 100_000
    path = recording(tmp_path / "bomb.memprof", {Stacks: (20, data)})
    told = refused("export", path, "--to", "csv", "-o", tmp_path / "tables")
    assert "table 'stacks' cannot be read (it unpacks from" in told


def test_what_pages_unpack_to_is_read_off_the_pages() -> None:
    """Each column's pages are walked, and together come to what is in them."""
    data = letters(20)
    total = sum(pq.read_metadata(pa.BufferReader(data)).row_group(group).total_byte_size for group in range(20))
    assert unpacked_bytes(data) >= 20 * 20_000_000
    assert total >= 20 * 20_000_000
    with pytest.raises(CorruptTableError, match="unpacks from"):
        read_table(Stacks, data)


def test_rows_that_the_manifest_does_not_tell_are_not_read(tmp_path: Path) -> None:
    """A manifest of one row over a table of a million is refused before the table is decoded."""
    data = parquet({"op_id": pa.nulls(1_000_000, pa.int64())})
    trace = Trace.open(recording(tmp_path / "run.memprof", {Memory: (1, data)}))
    with pytest.raises(BadInputError, match="its row count differs from the manifest"):
        trace.table(Memory)


@pytest.mark.parametrize(
    "unit",
    [b"\0", b" ", b"[", b"{}," * 4, b'{"name":"[memory]"},'],
    ids=["nulls", "blanks", "lists", "dicts", "events"],
)
def test_a_compressed_bomb_is_refused(tmp_path: Path, unit: bytes) -> None:
    """Some 300 MB of the same, packed into less than one."""
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents":[' if unit != b"\0" else b"")
        for _ in range(300):
            file.write(unit * (1_000_000 // len(unit)))
    refused("import", path, "-o", tmp_path / "run.memprof")
    assert not (tmp_path / "run.memprof").exists()


def test_a_list_of_empty_objects_is_refused(tmp_path: Path) -> None:
    """Three bytes of JSON that take sixty of memory, thirty million times."""
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"traceEvents":[' + b"{}," * 30_000_000 + b"{}]}")
    assert "are too many" in refused("import", path, "-o", tmp_path / "run.memprof")


@pytest.mark.parametrize(
    "kind",
    ["report", "diff", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("import", "predict", "verify"))],
)
def test_devices_and_silent_pipes_are_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node like /dev/zero never ends, a pipe without a writer never begins: neither blocks the reader."""
    paths = []
    os.mkfifo(tmp_path / "pipe")
    paths.append(tmp_path / "pipe")
    if os.geteuid() == 0:
        try:
            os.mknod(tmp_path / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
            paths.append(tmp_path / "zero")
        except PermissionError:
            pass  # no device nodes in this container
    sample = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"
    for path in paths:
        words = {
            "report": ["report", path],
            "import": ["import", path, "-o", tmp_path / "out.memprof"],
            "predict": ["predict", sample, "--plan", path],
            "diff": ["diff", path, sample],
            "verify": ["verify", path, sample],
        }[kind]
        assert path.name in refused(*words)


def test_what_comes_out_of_a_pipe_is_read(tmp_path: Path) -> None:
    """A pipe with a late writer is read like any other file, up to the limit."""
    os.mkfifo(tmp_path / "pipe")
    for size, limit in ((300_000, 400_000), (300_000, 200_000)):
        writer = threading.Timer(0.1, _write_if_read, (tmp_path / "pipe", b"x" * size))
        writer.start()
        if size <= limit:
            assert read_bytes(tmp_path / "pipe", limit) == b"x" * size
        else:
            with pytest.raises(BadInputError, match="at most"):
                read_bytes(tmp_path / "pipe", limit)
        writer.join()


def _write_if_read(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except BrokenPipeError:
        return  # the reader refused the rest


def test_a_pipe_that_is_held_open_and_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has it open, and nothing comes."""
    monkeypatch.setattr(reading, "_SILENT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(BadInputError, match="sent no data for"):
            read_bytes(tmp_path / "pipe")
    finally:
        os.close(held)


def test_texts_that_are_none_are_told(tmp_path: Path) -> None:
    """A byte order mark is skipped; other encodings and null characters are refused with a message."""
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    assert read_text(path) == "a = 1\r\n"
    for content, words in ((b"\xff\xfea\0", "not UTF-8 text"), (b"a\0b", "null characters")):
        path.write_bytes(content)
        with pytest.raises(BadInputError, match=words):
            read_text(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deep"),
        ("1" * 5_000, "thousands of digits"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' is duplicated"),
        ('{"a": "\x1b"}', "Invalid control character"),
        ("{", "line 1"),
    ],
)
def test_json_that_is_none_is_told(text: str, words: str) -> None:
    """Each in a clause of its own."""
    with pytest.raises(ValueError, match=words):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5_000, "nested too deep"),
        (".".join(["a"] * 50_000) + " = 1", "nested too deep"),
        ("[" + " . ".join(["'a'", '"b c"', "d-e"] * 5_000) + "]", "nested too deep"),
        ("a = {" + ".".join(["a"] * 20_000) + " = 1}", "nested too deep"),
        ("a = " + "{b = " * 5_000, "nested too deep"),
        ("a = 1\n" * 50_000, "longer than 256.00 KiB"),
        ("a = " + "1" * 5_000, "thousands of digits"),
        ("a = 0x" + "f" * 5_000, "more than 64 bits"),
        ("a = [[1, {b = 18446744073709551616}]]", "more than 64 bits"),
    ],
)
def test_toml_that_is_none_is_told(text: str, words: str) -> None:
    """Each in a clause of its own."""
    since = time.monotonic()
    with pytest.raises(ValueError, match=words):
        parse_toml(text)
    assert time.monotonic() - since < 5  # 25 s for the first of many parts


def test_long_plans_of_a_few_parts_are_read() -> None:
    """Names of modules have parts, and a list of them is long; so is the text that looks for keys of many parts."""
    names = [f"model.layers.{number}.mlp.gate-proj" for number in range(5_000)]
    text = f"a = {json.dumps(names)}\n[b]\n{'c' * 10_000} = '{'d.' * 90}'\n# {'x' * 20_000} {chr(34) * 9_001}\n"
    assert parse_toml(text)["a"] == names


def test_entries_of_a_zip_do_not_lie_over_one_another(tmp_path: Path) -> None:
    """Of two entries of one name, or at one place, neither is believed."""
    path = tmp_path / "run.memprof"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
        archive.writestr("manifest.jsox", "[]")
    path.write_bytes(path.read_bytes().replace(b"manifest.jsox", b"manifest.json"))
    with pytest.raises(BadInputError, match="same name"):
        Trace.open(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "x" * 100)
        archive.writestr("b", "y" * 100)
        archive.getinfo("b").header_offset = 0
    with pytest.raises(BadInputError, match="overlaps another"):
        Trace.open(path)


def test_a_list_of_entries_without_end_is_not_read(tmp_path: Path) -> None:
    """What the end of a zip claims of its list is looked at before the list is."""
    path = tmp_path / "run.memprof"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    data = bytearray(path.read_bytes())
    place = data.rfind(b"PK\x05\x06")
    data[place + 12 : place + 16] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadInputError, match="list of entries takes"):
        Trace.open(path)


def test_an_import_of_a_directory_is_told(tmp_path: Path) -> None:
    """As before."""
    with pytest.raises(BadInputError, match="is a folder"):
        import_file(tmp_path)
