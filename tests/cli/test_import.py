"""`memprof import` as it is typed and read."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.allocator import imported_parts
from memprof.analysis.allocator.imported_parts import import_parts, imported_block_sizes
from memprof.cli.main import main
from memprof.errors import BadInputError, UsageError
from memprof.trace.importers.importing import import_file
from memprof.trace.importers.pickles import pickle_stream
from memprof.trace.schema import AllocatorEvents, Memory, Stacks
from memprof.trace.store import Trace
from tests.trace.importers.test_kineto import job
from tests.trace.importers.writing import (
    BACKWARD,
    DATA,
    FORWARD,
    MIB,
    TRAIN,
    block,
    entry,
    freed,
    segment,
    small_job,
    snapshot,
    write,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "snapshot.pickle", small_job())
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> tuple[str, str]:
    """Runs memprof; returns what it printed and what it said."""
    assert main(list(map(str, words))) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out, captured.err


def test_writes_a_recording_and_says_what_to_type_next(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Figures on stdout, the next command on stderr, the recording under the file's own name."""
    out, err = run(capsys, "import", "snapshot.pickle")
    assert out.splitlines() == [
        "device  entries  peak allocated  peak reserved  end allocated  end reserved  history",
        "cuda:0        8        8.00 MiB      12.00 MiB       7.00 MiB     12.00 MiB  a window of the job",
    ]
    assert err == "memprof: wrote snapshot.memprof; next: memprof report snapshot.memprof\n"
    assert Trace.open(folder / "snapshot.memprof").manifest.backend.name == "cuda-snapshot"


def test_every_verb_opens_what_was_imported(capsys: pytest.CaptureFixture[str]) -> None:
    """report, report --json, diff, check and summary work on it."""
    run(capsys, "import", "snapshot.pickle", "-o", "run.memprof")
    out, _ = run(capsys, "report", "run.memprof")
    assert out.startswith("peak 8.00 MiB allocated in step 0, backward (aten.mm)")
    assert "recording began with 4,194,304 requested bytes in use already" in out
    out, _ = run(capsys, "report", "run.memprof", "--json")
    assert json.loads(out)["peak"]["reserved_bytes"] == 12 * MIB
    out, _ = run(capsys, "diff", "run.memprof", "run.memprof")
    assert out.startswith("Nothing changed")
    run(capsys, "diff", "run.memprof", "--budget", "8MiB")
    out, _ = run(capsys, "export", "run.memprof", "--to", "summary")
    assert json.loads(out)["spots"]["peak"]["bytes"] == 8 * MIB


def test_a_peak_that_is_a_lower_bound_leaves_a_budget_undecided(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """Of the CPU, where torch does not count what was in use before: 3 below the budget and the gate, 4 above.

    The same events of a card, which counts it, pass.
    """
    events = job()
    (folder / "card.json").write_text(json.dumps(events))
    run(capsys, "import", "card.json", "-o", "card.memprof")
    run(capsys, "diff", "card.memprof", "--budget", "1TiB")
    for event in events:
        if event["name"] == "[memory]":
            event["args"] |= {"Device Type": 0, "Device Id": -1, "Total Reserved": 0}
    (folder / "late.json").write_text(json.dumps(events))
    run(capsys, "import", "late.json", "-o", "late.memprof")
    out, _ = run(capsys, "diff", "late.memprof", "--budget", "1TiB", status=3)
    assert "unknown: peak is undecided, at least" in out
    assert "the peak is a lower bound" in out
    run(capsys, "diff", "late.memprof", "--budget", "1KiB", status=4)
    run(capsys, "diff", "late.memprof", "late.memprof", "--fail-on", "peak>1TiB", status=3)


def test_refuses_to_replace_a_file_before_reading_anything(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Exit code 2 without -f, and the file is as it was; -f replaces it."""
    (folder / "snapshot.memprof").write_text("precious")
    _, err = run(capsys, "import", "snapshot.pickle", status=2)
    assert "exists already" in err
    assert (folder / "snapshot.memprof").read_text() == "precious"
    run(capsys, "import", "snapshot.pickle", "-f")
    assert Trace.open(folder / "snapshot.memprof").rank == 0


def test_bad_input_is_one_sentence_and_exit_code_5(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A malicious file is named with what it asks for; nothing is written."""
    (folder / "bad.pickle").write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    _, err = run(capsys, "import", "bad.pickle", status=5)
    assert "bad.pickle is not a memory snapshot, or is damaged: it imports os.system (opcode STACK_GLOBAL)" in err
    assert len(err.splitlines()) == 1
    assert not (folder / "bad.memprof").exists()


def test_a_profilers_trace_is_imported_under_its_name(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """trace.pt.trace.json.gz becomes trace.memprof."""
    (folder / "worker.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(job()).encode()))
    out, _ = run(capsys, "import", "worker.pt.trace.json.gz")
    assert "3.00 KiB" in out
    out, _ = run(capsys, "report", "worker.memprof", "--step", 4)
    assert out.startswith("peak 3.00 KiB allocated in step 4, backward (aten.mm)")


def test_without_a_timeline_it_says_how_to_record_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """The end state is imported, and a note names what is missing."""
    write(folder / "end.pickle", snapshot([segment(0, block(MIB))]))
    out, err = run(capsys, "import", "end.pickle")
    assert "none: end state only" in out
    assert "torch.cuda.memory._record_memory_history()" in err


def test_devices_and_ranks_can_be_chosen(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """One device of several, as any rank; several devices as ranks of one recording."""
    write(folder / "two.pickle", snapshot((), *([entry("alloc", 0, 512)] * 2 for _ in range(2))))
    run(capsys, "import", "two.pickle")
    assert Trace.open(folder / "two.memprof").ranks == (0, 1)
    run(capsys, "import", "two.pickle", "--only", "cuda:1", "--rank", 7, "-o", "one.memprof")
    assert Trace.open(folder / "one.memprof").ranks == (7,)
    assert "holds nothing of device 4" in run(capsys, "import", "two.pickle", "-f", "--only", 4, status=2)[1]
    assert (
        "is now --only" in run(capsys, "import", "two.pickle", "--device", 1, "--rank", 7, "-f", "-o", "one.memprof")[1]
    )
    assert Trace.open(folder / "one.memprof").ranks == (7,)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real files are not here: there is no {DATA}")
def test_every_real_file_is_imported_and_reported(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Every third-party file gives a report, or a message if it contains no memory data."""
    for file in sorted([*DATA.glob("snapshots/*"), *DATA.glob("kineto/*")]):
        has_memory = "5c04d97c" not in file.name
        _, err = run(capsys, "import", file, "-f", "-o", "run.memprof", status=0 if has_memory else 5)
        if not has_memory:
            assert "none of memory: record it with torch.profiler.profile(profile_memory=True)" in err
            continue
        out, _ = run(capsys, "report", "run.memprof")
        has_history = "no history was recorded" not in out
        assert out.startswith("peak ") == has_history
        assert ("when the snapshot was taken" in out.splitlines()[0]) != has_history
        assert file.name in out


def test_warns_before_loading_what_may_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that may need more memory than is free causes a warning, and is still read."""
    monkeypatch.setattr("memprof.cli.verbs.import_._LARGE_BYTES", 100)
    assert "may take" not in run(capsys, "import", "snapshot.pickle")[1]
    monkeypatch.setattr("memprof.cli.verbs.import_._MEMORY_PER_BYTE", 1 << 40)
    _, err = run(capsys, "import", "snapshot.pickle", "-f")
    assert err.startswith("memprof: loading snapshot.pickle may take up to ")
    assert "wrote snapshot.memprof" in err


def patterns(text: str) -> None:
    Path("mine.toml").write_text(f"[categories]\n{text}\n")


def test_memory_is_named_by_the_users_own_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    """The first pattern that matches file:function of any frame names it, in the report and from the import on."""
    history = [
        entry("alloc", 0, MIB, TRAIN),
        entry("alloc", MIB, 2 * MIB, FORWARD),  # in model.py, called by train.py
        entry("alloc", 3 * MIB, 3 * MIB),
    ]
    end = segment(0, *(block(size * MIB) for size in (1, 2, 3)))
    write(Path("snapshot.pickle"), snapshot([end], history))
    run(capsys, "import", "snapshot.pickle")
    patterns("'model\\.py:forward$' = \"my model\"\n'job/.*:main' = \"the rest\"\n'model' = \"never\"")
    asked = ("report", "snapshot.memprof", "--by", "category")
    assert "my model" not in run(capsys, *asked)[0]
    out, _ = run(capsys, *asked, "--categories", "mine.toml")
    rows = [line.split("  ") for line in out.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row[0] in ("my model", "the rest")] == [
        ("my model", "pattern"),
        ("the rest", "pattern"),
    ]
    out, _ = run(capsys, *asked, "--categories", "mine.toml", "--json")
    assert json.loads(out)["at_peak"]["by_category"] == {"temporary": 3 * MIB, "my model": 2 * MIB, "the rest": MIB}
    run(capsys, "import", "snapshot.pickle", "-f", "--categories", "mine.toml")
    assert run(capsys, *asked)[0] == run(capsys, *asked, "--categories", "mine.toml")[0]


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("'(a+' = 'x'", 2, "invalid pattern '(a+': missing ): (a+"),
        ("'(?=a)' = 'x'", 2, "invalid pattern '(?=a)': invalid perl operator"),
        ("'(a{1000}){1000}' = 'x'", 2, "invalid pattern"),
        ("'a' = 'x=y'", 2, "invalid name 'x=y' for 'a'"),
        ("'a' = 7", 2, "invalid name 7 for 'a'"),
        ("[other]", 2, "unknown key 'other'"),
        ("", 2, "must have 1 to 100 patterns"),
        ("a = ", 5, "is not valid TOML"),
    ],
)
def test_patterns_that_are_none_end_with_a_sentence(
    text: str, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A regular expression that would take exponential time takes none here; what is no pattern is named."""
    patterns(text)
    for verb in ("import", "report"):
        _, err = run(capsys, verb, "snapshot.pickle", "--categories", "mine.toml", status=status)
        assert words in err
        assert err.count("\n") == 1
    patterns(f"'({'(a+)+' * 50})+$' = 'x'")
    run(capsys, "import", "snapshot.pickle", "-f", "--categories", "mine.toml")


def long_history(entries: int) -> dict[str, Any]:
    """Blocks that come and go over two that stay, one of them from before the history, with two lines of code."""
    history, alive = [entry("alloc", 4 * MIB, MIB, TRAIN, time_us=1)], []
    for number in range(entries):
        place = 8 * MIB + number % 7 * MIB
        if place in alive:
            alive.remove(place)
            history += freed(place, MIB, frames=FORWARD, time_us=number + 2)
        history.append(entry("alloc", place, MIB, FORWARD if number % 3 else TRAIN, time_us=number + 2))
        alive.append(place)
    held = [
        block(MIB) if number in (0, 4) or (number * MIB in alive) else block(MIB, "inactive") for number in range(18)
    ]
    return snapshot([segment(0, *held)], history)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_parts_of_a_history_are_what_the_whole_has(
    protocol: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part begins with what the parts before it left, so that every counter, block and line is the whole's."""
    monkeypatch.setattr(pickle_stream, "_PIECE_BYTES", 1000)  # parts begin where a piece does
    path = folder / "long.pickle"
    path.write_bytes(pickle.dumps(long_history(300), protocol))
    ((_, whole),) = import_file(path, block_sizes=imported_block_sizes).ranks
    found = {number: imported for number, _, imported in import_parts(path, 6_000, None, lambda what, share: None)}
    assert len(found) > 3
    parts = [found[number].ranks[0] for number in sorted(found)]
    for name in ("allocated_bytes", "reserved_bytes"):
        joined = np.concatenate([getattr(tables[Memory], name)[1:] for _, tables in parts])
        assert joined.tolist() == getattr(whole[Memory], name)[1:].tolist()
    assert [manifest.capture.is_complete for manifest, _ in parts] == [True] * len(parts)
    events = np.concatenate(
        [tables[AllocatorEvents].block_bytes[tables[AllocatorEvents].index >= 0] for _, tables in parts]
    )
    assert events.tolist() == whole[AllocatorEvents].block_bytes[whole[AllocatorEvents].index >= 0].tolist()
    stays = parts[1][1][Stacks].frames
    assert any(text.startswith("/job/train.py") for text in stays)  # of the block that the first part allocated


def test_a_file_is_split_into_recordings(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """--split writes numbered recordings; what is no pickle of torch, or has several devices, is refused."""
    run(capsys, "import", "snapshot.pickle", "--split", "1MiB")
    assert run(capsys, "report", "snapshot-1.memprof")[0].startswith("peak 8.00 MiB")
    assert "exists already" in run(capsys, "import", "snapshot.pickle", "--split", "1MiB", status=2)[1]
    assert "No such file" in run(capsys, "import", "none.pickle", "--split", "1MiB", status=5)[1]
    assert "too small" in run(capsys, "import", "snapshot.pickle", "--split", "7", status=2)[1]
    two = snapshot((), [entry("alloc", 0, MIB)], [entry("alloc", 0, MIB), entry("alloc", MIB, MIB)])
    write(folder / "two.pickle", two)
    assert "such as 0 and 1: choose --only" in run(capsys, "import", "two.pickle", "--split", "1MiB", status=2)[1]
    (folder / "own.toml").write_text("[categories]\n'train' = 'ours'\n")
    run(capsys, "import", "two.pickle", "--split", "1MiB", "--only", "cuda:1", "--categories", "own.toml")
    manifest = Trace.open("two-1.memprof").manifest
    assert (manifest.rank, bool(manifest.categories)) == (1, True)
    for option in (("--rank", "3"), ("--json",)):
        assert "do not go with it" in run(capsys, "import", "two.pickle", "--split", "1MiB", *option, status=2)[1]
    err = run(capsys, "import", "two.pickle", "--split", "1MiB", "--only", "host", status=2)[1]
    assert "import --only host without it" in err


def split(path: Path, content: object, size: int = 1 << 20) -> list[Any]:
    """Splits a file of some bytes, or of a pickle of some content."""
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, 4))
    return list(import_parts(path, size, None, lambda what, share: None))


def test_remarks_on_parts_are_shown(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """That a job ran out of memory is said with the name of the part."""
    write(folder / "full.pickle", snapshot((), [entry("alloc", 0, MIB, TRAIN), entry("oom", 9, MIB, TRAIN)]))
    err = run(capsys, "import", "full.pickle", "--split", "1MiB")[1]
    assert "full-1.memprof: device 0 ran out of memory: /job/train.py:9:main requested 1.00 MiB" in err


def test_parts_are_there_whole_or_not_at_all(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are read from the last to the first: a bad entry in the first leaves none, and none is replaced."""
    monkeypatch.setattr(pickle_stream, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(imported_parts, "LEAST_BYTES", 20_000)
    content = long_history(400)
    write(folder / "long.pickle", content)
    run(capsys, "import", "long.pickle", "--split", "20KB")
    before = {path.name: path.read_bytes() for path in folder.glob("long-*.memprof")}
    assert len(before) > 2
    content["device_traces"][0][3]["size"] = "many"
    write(folder / "long.pickle", content)
    err = run(capsys, "import", "long.pickle", "--split", "20KB", "-f", status=5)[1]
    assert err.startswith("memprof: long.pickle: among the sizes of the history of device 0 is a text")
    assert {path.name: path.read_bytes() for path in folder.glob("long-*")} == before
    assert not list(folder.glob(".memprof-*"))


def test_a_full_temporary_folder_is_said(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing temporary folder is a wrong setting, one without room a full disk (exit code 1); TMPDIR is named."""
    monkeypatch.setattr("tempfile.tempdir", str(folder / "none"))
    err = run(capsys, "import", "snapshot.pickle", "--split", "1MiB", status=2)[1]
    assert "the temporary folder cannot be written: No such file or directory. Set TMPDIR" in err
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    write(folder / "long.pickle", long_history(3000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        err = run(capsys, "import", "long.pickle", "--split", "1MiB", status=1)[1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the temporary folder cannot be written: the file size limit of this shell" in err


def test_blocks_without_addresses_keep_their_stacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.0 writes no addresses of blocks, and their frames under ``history``: a part without any alloc is read."""
    monkeypatch.setattr(pickle_stream, "_PIECE_BYTES", 1000)
    held = [{"size": MIB, "state": "active_allocated", "history": [{"addr": 0, "real_size": MIB, "frames": FORWARD}]}]
    memory = segment(0, block(MIB)) | {"blocks": held}
    history = [entry("alloc", 9 * MIB, MIB, TRAIN), *freed(9 * MIB, MIB)] * 10
    history += [entry("snapshot", 0, 0, BACKWARD, time_us=number) for number in range(200)]
    found = split(folder / "old.pickle", snapshot([memory, segment(9 * MIB, block(MIB, "inactive"))], history), 2000)
    assert len(found) > 2
    assert not any("alloc" in one.devices[0]["actions"] for number, _, one in found if number > 2)
    for _, _, imported in found:
        ((_, tables),) = imported.ranks
        assert any(text.startswith("/job/model.py:3") for text in tables[Stacks].frames)


@pytest.mark.parametrize(
    "content",
    [
        snapshot((), [entry("alloc", 0, MIB), {"action": "alloc", "addr": [], "size": 1}]),
        snapshot([1], [entry("alloc", 0, MIB), entry("alloc", MIB, MIB)]),
        {**snapshot((), [entry("alloc", 0, MIB), entry("alloc", MIB, MIB)]), "segments": 7},
        {**snapshot((), [entry("alloc", 0, MIB)]), 5: []},
        snapshot((), [{"action": "alloc", "addr": 0, "size": 1, "frames": [[]] * 100_000}]),
    ],
    ids=["address", "segments", "no segments", "key", "list"],
)
def test_damaged_content_is_bad_input(capsys: pytest.CaptureFixture[str], folder: Path, content: Any) -> None:
    """A value of another kind ends as bad input with the file's name, not as an internal error."""
    (folder / "odd.pickle").write_bytes(pickle.dumps(content, 4))
    err = run(capsys, "import", "odd.pickle", "--split", "1MiB", status=5)[1]
    assert err.startswith("memprof: odd.pickle")
    assert err.count("\n") == 1


def test_nothing_hostile_is_split(folder: Path) -> None:
    """What imports a name, is cut short anywhere, or has opcodes of other kinds is refused, and nothing is run."""
    sound = pickle.dumps(long_history(3), 4)
    hostile = [pickle.dumps({"device_traces": [[print]]}), pickle.dumps({"device_traces": {(("a",), 1): 2}})]
    hostile += [sound[:size] for size in range(1, len(sound) - 1, 97)] + [
        b"\x80\x04}(r\xff\xff\xff\x7f.",
        b"(((",
        b"\x80\x04.",
        b"\x80\x04}(X\x00\x00\x00\x7f" + b"a" * 3_000_000,
        b"\x80\x04}(\x8c\x0ddevice_traces]](}(\x8c\x01a" + b"]" * 100_000 + b"a" * 99_999 + b"ueau.",
    ]
    for content in hostile:
        with pytest.raises(BadInputError):
            split(folder / "bad.pickle", content)


def test_hostile_files_take_no_quadratic_time_or_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal hashes, values before a history, and a long list that each entry refers to: each is refused or linear."""
    numbers = b"".join(b"\x8a\x09" + (number * (2**61 - 1)).to_bytes(9, "little") + b"N" for number in range(9, 2000))
    with pytest.raises(BadInputError):
        split(folder / "bad.pickle", b"\x80\x04}(" + numbers + b"u.")
    before = b"\x80\x04}(" + b"K\x01" * 500_000 + b"}\x94" * 300_000 + b"u."
    with pytest.raises(BadInputError):
        split(folder / "bad.pickle", before)
    shared = [{"line": 1}] * 15_000
    history = [{"action": "alloc", "addr": 0, "size": 1, "frames": shared} for _ in range(40_000)]
    path = folder / "bad.pickle"
    path.write_bytes(pickle.dumps(snapshot((), history), 4))
    with path.open("rb") as file:
        entries = [one for _, one in pickle_stream.PickleStream(file).entries()]
    assert len({id(one["frames"]) for one in entries}) == 1
    monkeypatch.setattr(pickle_stream, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(imported_parts, "LEAST_BYTES", 1000)
    with pytest.raises(UsageError, match="16 times its bytes in parts: name a larger --split"):
        split(path, path.read_bytes(), 1000)


def test_no_entry_is_kept_once_it_is_handed_on(folder: Path) -> None:
    """An entry is gone when the next is asked for, also of a list that is put together only at its end."""
    one = b"}\x94(\x8c\x06action\x8c\x05alloc\x8c\x05alone]u"
    (folder / "one.pickle").write_bytes(b"\x80\x04}(\x8c\x0ddevice_traces](](" + one * 3000 + b"eeu.")
    with (folder / "one.pickle").open("rb") as file:
        entries = pickle_stream.PickleStream(file).entries()
        for _ in range(2900):
            assert next(entries) == (0, {"action": "alloc", "alone": []})
        alive = [each for each in gc.get_objects() if type(each) is dict and each.keys() == {"action", "alone"}]
    assert len(alive) <= 1
