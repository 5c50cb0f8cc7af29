"""The .memprof file: whole, small, the same every time, and never trusted."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memprof.trace.files.archive
from memprof.errors import BadInputError
from memprof.trace.manifest import Manifest
from memprof.trace.schema import SCHEMA_VERSION, TABLES
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, Tables, assert_tables_equal, make_tables
from tests.strategies import jobs


def read_all(path: Path) -> Trace:
    """Opens a trace and reads every table of every rank."""
    trace = Trace.open(path)
    for rank in trace.ranks:
        for kind in TABLES:
            trace.rank_trace(rank).table(kind)
    return trace


@given(jobs())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_job_comes_back_as_it_was(tmp_path: Path, job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Every table written is read back equal, and its steps keep their promises."""
    tables = make_tables(*job)
    write_trace(tmp_path / "run.memprof", [(Manifest(target="train.py"), tables)])
    trace = read_all(tmp_path / "run.memprof")
    assert trace.manifest == Manifest(target="train.py")
    for kind in TABLES:
        assert_tables_equal(tables.get(kind, kind.empty()), trace.table(kind))
    for number in trace.recorded_steps:
        trace.step(number).check()


def test_same_input_gives_same_bytes(tmp_path: Path, small_tables: Tables) -> None:
    """Writing twice gives two equal files."""
    for name in ("one", "two"):
        write_trace(tmp_path / name, [(Manifest(), small_tables), (Manifest(rank=1), small_tables)])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_any_zip_and_parquet_tool_reads_it(small_file: Path) -> None:
    """The file is an uncompressed zip of JSON and Parquet with coded columns, as the format page says."""
    import pandas as pd

    with zipfile.ZipFile(small_file) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        top = json.loads(archive.read("manifest.json"))
        assert (top["schema_version"], top["ranks"]) == (SCHEMA_VERSION, [0])
        assert json.loads(archive.read("rank0/manifest.json"))["target"] == "train.py"
        ops = pd.read_parquet(io.BytesIO(archive.read("rank0/ops.parquet")))
    assert ops["op_id:d"].cumsum().tolist() == [0, 1, 2, 3, 4, 5]


def test_no_half_file_when_the_disk_is_full(
    tmp_path: Path, small_tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write keeps the existing file, and leaves no other."""
    path = tmp_path / "run.memprof"
    path.write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(path, [(Manifest(), small_tables)])
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("run.memprof", b"before")]


def test_no_half_file_when_a_table_cannot_be_written(tmp_path: Path, small_tables: Tables) -> None:
    """An error in the middle of a table leaves no file."""

    def failing() -> Iterator[tuple[str, bytes]]:
        yield "manifest.json", b"{}"
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        memprof.trace.files.archive.write_archive(tmp_path / "run.memprof", failing())
    assert list(tmp_path.iterdir()) == []


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The same bytes at any time of the day: all processes that run tests must name them alike."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return sink.getvalue()


def tarred() -> bytes:
    sink = io.BytesIO()
    tarfile.open(fileobj=sink, mode="w").close()
    return sink.getvalue()


TOP = {"schema_version": SCHEMA_VERSION, "memprof_version": "1.0", "ranks": [0], "tables": {}}


def top(**changes: Any) -> bytes:
    return json.dumps({**TOP, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "bad.memprof is empty."),
        (b"P", "is damaged: it is cut short."),
        (b"PK\x03\x04 and no more", "is damaged: it is cut short, or its bytes were changed."),
        (
            pickle.dumps({"segments": []}),
            "looks like a PyTorch memory snapshot: memprof import makes a recording of it",
        ),
        (b'{"traceEvents": []}', "it looks like JSON"),
        (b"\n [1, 2]", "it looks like JSON"),
        (b"\xef\xbb\xbf<!doctype html>", "it looks like HTML"),
        (b"PAR1xxxxPAR1", "it is a single Parquet table"),
        (b"\x1f\x8b\x08", "it is compressed with gzip"),
        (b"hello", "is not a memprof recording: it is not a zip archive."),
        (tarred(), "is not a memprof recording: it is not a zip archive."),
        (zipped({"archive/data.pkl": b"x"}), "is not a memprof recording: it is a zip without a manifest.json."),
        (zipped({"manifest.json": b"hello"}), "its manifest.json is not JSON."),
        (zipped({"manifest.json": b"[" * 100_000}), "its manifest.json is not JSON."),
        (zipped({"manifest.json": b"[]"}), "its manifest.json is not a JSON object."),
        (zipped({"manifest.json": b'{"name": "my-extension"}'}), "its manifest.json has no schema version."),
        (zipped({"manifest.json": top(schema_version="1")}), "its manifest.json has no schema version."),
        (zipped({"manifest.json": top(ranks="all")}), "its manifest.json lists no ranks and tables."),
        (zipped({"manifest.json": top(ranks=[-1])}), "its manifest.json lists no ranks and tables."),
        (zipped({"manifest.json": top(tables={"rank0/ops.parquet": None})}), "lists no ranks and tables."),
        (zipped({"manifest.json": top(ranks=[])}), "holds no recorded process."),
        (zipped({"manifest.json": top()}), "is damaged: the manifest of rank 0 is missing."),
        (
            zipped({"manifest.json": top(), "rank0/manifest.json": b'{"pid": "x"}'}),
            "is damaged: in the manifest of rank 0, 'pid' holds no int.",
        ),
        (
            zipped({"manifest.json": top(), "rank0/manifest.json": b'{"pids": 3}'}),
            "is damaged: the manifest of rank 0 has no known key.",
        ),
        (
            zipped({"manifest.json": top(), "../../etc/passwd": b""}),
            "its entry '../../etc/passwd' points outside the file.",
        ),
        (zipped({"manifest.json": top(), "/etc/passwd": b""}), "its entry '/etc/passwd' points outside the file."),
        (
            zipped({"manifest.json": top()}, zipfile.ZIP_DEFLATED),
            "its entry 'manifest.json' is compressed or encrypted",
        ),
        (
            zipped({"manifest.json": top(schema_version=SCHEMA_VERSION + 1, memprof_version="9.9")}),
            f"was written by memprof 9.9 with trace schema {SCHEMA_VERSION + 1}; this is memprof",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_bad_files_each_get_their_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    """A file that is not a trace is refused with one message that names the file and its format."""
    path = tmp_path / "bad.memprof"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        Trace.open(path)
    message = str(caught.value)
    assert sentence in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_table_lost_from_the_zip_is_missed(tmp_path: Path, small_file: Path) -> None:
    """A table the manifest lists and the zip does not hold is an error, not a table without rows."""
    with zipfile.ZipFile(small_file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist() if entry != "rank0/uses.parquet"}
    path = tmp_path / "bad.memprof"
    path.write_bytes(zipped(entries))
    with pytest.raises(BadInputError, match=r"is damaged: its entry 'rank0/uses\.parquet' is missing\."):
        read_all(path)


def test_a_table_of_another_length_is_missed(tmp_path: Path, small_file: Path) -> None:
    """A table with other row counts than the manifest's is an error."""
    with zipfile.ZipFile(small_file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    path = tmp_path / "bad.memprof"
    path.write_bytes(zipped({**entries, "rank0/uses.parquet": entries["rank0/saved.parquet"]}))
    with pytest.raises(BadInputError, match="its row count differs from the manifest"):
        read_all(path)


def test_a_damaged_table_is_named(tmp_path: Path, small_file: Path) -> None:
    """The message names a table that is not Parquet."""
    with zipfile.ZipFile(small_file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    path = tmp_path / "bad.memprof"
    path.write_bytes(zipped({**entries, "rank0/ops.parquet": b"PAR1 rubbish PAR1"}))
    with pytest.raises(BadInputError, match=r"bad\.memprof is damaged: its table 'ops' cannot be read"):
        read_all(path)


def test_tables_and_keys_of_later_versions_are_ignored(tmp_path: Path, small_file: Path) -> None:
    """A file of the same schema version with more in it opens."""
    with zipfile.ZipFile(small_file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    record = json.loads(entries["manifest.json"])
    record["tables"]["rank0/weather.parquet"] = 3
    path = tmp_path / "later.memprof"
    path.write_bytes(
        zipped({**entries, "manifest.json": json.dumps({**record, "colour": 1}).encode(), "rank0/weather.parquet": b""})
    )
    assert read_all(path).recorded_steps == (0, 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A missing file is reported as missing, with its unpacked spool if there is one."""
    path = tmp_path / "run.memprof"
    with pytest.raises(BadInputError, match=r"no file .*run\.memprof: check"):
        Trace.open(path)
    (tmp_path / "run.memprof.spool").mkdir()
    with pytest.raises(BadInputError, match=r"was not packed: open .*run\.memprof\.spool instead"):
        Trace.open(path)
    with pytest.raises(BadInputError, match="File name too long"):
        Trace.open(tmp_path / ("x" * 5000))
    with pytest.raises(BadInputError, match="cannot be read"):
        Trace.open("a\0b")


def test_a_file_that_goes_away_is_told(small_file: Path) -> None:
    """Tables are read late; a file removed in between is an error of the same kind."""
    trace = Trace.open(small_file)
    small_file.unlink()
    with pytest.raises(BadInputError, match="no file"):
        trace.recorded_steps  # noqa: B018 - the property reads the table


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, small_file: Path) -> None:
    """A trace cut short at any byte is an error of ours with one sentence, never another exception."""
    data = small_file.read_bytes()
    path = tmp_path / "cut.memprof"
    places = {*range(300), *range(len(data) - 300, len(data)), *range(300, len(data) - 300, 97)}
    for length in sorted(places):
        path.write_bytes(data[:length])
        with pytest.raises(BadInputError):
            Trace.open(path)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_are_refused_or_harmless(tmp_path: Path, small_file: Path, data: st.DataObject) -> None:
    """A trace with bytes changed anywhere opens as it was, or is an error of ours; never another exception."""
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.memprof"
    path.write_bytes(content)
    try:
        trace = read_all(path)
    except BadInputError:
        pass
    else:
        whole = read_all(small_file)
        for kind in TABLES:
            assert_tables_equal(whole.table(kind), trace.table(kind))


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are not a trace raise our own error, never another exception."""
    path = tmp_path / "any.memprof"
    for start in (b"", b"PK\x03\x04"):
        path.write_bytes(start + content)
        with pytest.raises(BadInputError):
            Trace.open(path)
