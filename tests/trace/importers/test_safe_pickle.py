"""The reader of pickles: plain containers come through whole, everything else is refused in one sentence."""

from __future__ import annotations

import base64
import collections
import contextlib
import copyreg
import datetime
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import BadInputError
from memprof.trace.importers.importing import import_file
from memprof.trace.importers.pickles.safe_pickle import RefusedError, load_plain
from tests.trace.importers.writing import small_job

RAN = "memprof_ran_a_pickle"


class Reduced:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Plain:
    """Pickles as a class with a state."""

    def __init__(self) -> None:
        self.value = 1


def persistent() -> bytes:
    class Pickler(pickle._Pickler):  # type: ignore[name-defined]
        def persistent_id(self, thing: Any) -> Any:
            return "model/0" if isinstance(thing, Plain) else None

    import io

    file = io.BytesIO()
    Pickler(file, protocol=4).dump([Plain()])
    return file.getvalue()


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


STOPPED = pickle.dumps([], protocol=4)
FRAMED = b"\x80\x04"

#: Name, bytes, and words of the sentence.
MALICIOUS: list[tuple[str, bytes, str]] = [
    ("os.system, protocol 4", pickle.dumps(Reduced(os.system, f"touch {RAN}"), 4), "posix.system"),
    ("os.system, protocol 2", pickle.dumps(Reduced(os.system, f"touch {RAN}"), 2), "posix.system"),
    ("os.system, protocol 0", b"cos\nsystem\n(S'touch ran'\ntR.", "os.system"),
    ("eval", pickle.dumps(Reduced(eval, "1"), 4), "builtins.eval"),
    ("exec among entries", pickle.dumps({"segments": [Reduced(exec, "x=1")]}, 5), "builtins.exec"),
    ("subprocess.Popen", pickle.dumps(Reduced(subprocess.Popen, "true"), 4), "subprocess.Popen"),
    ("a partial", pickle.dumps(functools.partial(os.system, "true"), 4), "functools.partial"),
    ("a class with a state", pickle.dumps(Plain(), 4), "Plain"),
    ("an OrderedDict", pickle.dumps(collections.OrderedDict(a=1), 4), "collections.OrderedDict"),
    ("a date", pickle.dumps(datetime.date(2026, 1, 1), 4), "datetime.date"),
    ("INST", FRAMED + b"(ios\nsystem\n.", "os.system"),
    ("GLOBAL in protocol 2", b"\x80\x02cnt\nsystem\n.", "nt.system"),
    (
        "STACK_GLOBAL from the memo",
        FRAMED + text("os") + b"\x94" + text("system") + b"\x94h\x00h\x01\x93.",
        "os.system",
    ),
    ("STACK_GLOBAL of no texts", FRAMED + b"K\x01K\x02\x93.", "STACK_GLOBAL"),
    ("REDUCE of what is there", FRAMED + b"]K\x01\x85R.", "two whole numbers"),
    ("REDUCE alone", FRAMED + b"NNR.", "REDUCE"),
    ("BUILD", FRAMED + b"}}b.", "BUILD"),
    ("OBJ", FRAMED + b"(No.", "OBJ"),
    ("NEWOBJ", FRAMED + b"NN\x81.", "NEWOBJ"),
    ("NEWOBJ_EX", FRAMED + b"NNN\x92.", "NEWOBJ_EX"),
    ("EXT1", FRAMED + b"\x82\x07.", "extension 7"),
    ("EXT4", FRAMED + b"\x84\x07\x00\x00\x00.", "extension 7"),
    ("a persistent id", persistent(), "model/0"),
    ("a persistent id as text", FRAMED + b"Pplace\n.", "persistent id 'place'"),
    ("a second pickle", STOPPED + pickle.dumps(Reduced(os.system, "true"), 4), "another pickle follows"),
    ("bytes behind the end", STOPPED + b"junk", "4 bytes follow"),
    ("a set", pickle.dumps({1}, 4), "EMPTY_SET"),
    ("bytes", pickle.dumps(b"abc", 4), "SHORT_BINBYTES"),
    ("a bytearray", pickle.dumps(bytearray(b"abc"), 5), "BYTEARRAY8"),
    ("a huge whole number", pickle.dumps(1 << 100_000, 4), "whole number of 12,501 bytes"),
    ("a whole number of 200 bytes", pickle.dumps(1 << 1590, 4), "whole number of 199 bytes"),
    ("a memo place far off", b"\x80\x02]r\xff\xff\xff\x7f.", "place 2,147,483,647 of its memo"),
    ("a memo place of nothing", FRAMED + b"h\x05.", "in an invalid order"),
    ("lists nested by appending", FRAMED + b"]" * 5000 + b"a" * 4999 + b".", "nested more than 64 deep"),
    ("lists nested by marks", FRAMED + b"](" * 5000 + b"e" * 5000 + b".", "nested more than 64 deep"),
    ("dicts nested", FRAMED + b"}N" * 300 + b"Ns" * 300 + b".", "nested more than 64 deep"),
    ("a billion lists", FRAMED + b"](" + b"]" * 200_000 + b"e.", "containers"),
    ("tuples that share a hash", pickle.dumps({(1, 2, 3): 4}, 4), "tuple"),
    ("nested pairs", pickle.dumps({((1, 2), (3, 4)): 4}, 4), "tuple"),
    ("a text longer than the file", FRAMED + b"X\xff\xff\xff\x7fabc.", "claims 2,147,483,647 bytes"),
    ("a text of 2**60 bytes", FRAMED + b"\x8d" + (1 << 60).to_bytes(8, "little") + b".", "claims"),
    ("a frame longer than the file", FRAMED + b"\x95" + (1 << 40).to_bytes(8, "little") + b"N.", "in an invalid order"),
    ("nothing behind the header", FRAMED, "cut short"),
    ("no end", FRAMED + b"]K\x01a", "cut short"),
    ("half an opcode", FRAMED + b"J\x01", "cut short"),
    ("a mark without an end", FRAMED + b"](K\x01.", "marks do not match"),
    ("an end without a mark", FRAMED + b"]e.", "marks do not match"),
    ("an empty stack", FRAMED + b".", "in an invalid order"),
    ("a list as a key", FRAMED + b"}]Ns.", "in an invalid order"),
    ("no opcode", FRAMED + b"\xff.", "0xff"),
    ("a text that is no UTF-8", FRAMED + b"\x8c\x02\xff\xfe.", "in an invalid order"),
    ("POP", FRAMED + b"N0N.", "POP"),
    ("DUP", FRAMED + b"N2.", "DUP"),
    ("protocol 9", b"\x80\x09N.", "does not start as a pickle"),
    ("os.system among entries, protocol 0", pickle.dumps([Reduced(os.system, "true")], 0), "posix.system"),
    ("os.system among entries, protocol 1", pickle.dumps([Reduced(os.system, "true")], 1), "posix.system"),
    ("lists nested in protocol 0", b"(l" * 100 + b"a" * 99 + b".", "nested more than 64 deep"),
    ("a tuple of tuples in protocol 1", b"](((K\x01ttq\x00a.", "tuple of something else"),
    ("a memo place far off in protocol 0", b"(lp2000000000\n.", "place 2,000,000,000 of its memo"),
    ("a number of many digits in protocol 0", b"(lL" + b"9" * 4000 + b"L\na.", "more than 64 bits"),
    ("a mark without an end in protocol 1", b"](K\x01.", "marks do not match"),
    ("an end without a mark in protocol 1", b"]q\x00e.", "marks do not match"),
    ("nothing to append in protocol 1", b"]q\x00aa.", "in an invalid order"),
    ("no end in protocol 0", b"(lp0\nI1\na", "cut short"),
    ("REDUCE in protocol 0", b"(lp0\nNNR.", "REDUCE"),
]


@pytest.mark.timeout(60)  # loading some of them would take for ever
@pytest.mark.parametrize(("data", "words"), [pytest.param(data, words, id=name) for name, data, words in MALICIOUS])
def test_is_refused_in_one_sentence_that_names_what_was_found(
    data: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no snapshot holds is refused by name, and nothing of it runs."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError) as refused:
        load_plain(data)
    assert words in refused.value.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [data for _, data, _ in MALICIOUS if data[:1] == b"\x80"])
def test_importing_it_is_bad_input(data: bytes, tmp_path: Path) -> None:
    """Every such file ends in one sentence with the file's name and exit code 5."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(data)
    with pytest.raises(BadInputError) as refused:
        import_file(file)
    message = str(refused.value)
    assert message.startswith(str(file))
    assert message.endswith(".")
    assert "\n" not in message
    assert refused.value.exit_code == 5


def test_registered_extensions_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that this process knows is named and refused all the same."""
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(RefusedError, match=r"imports os\.system \(opcode EXT1\)"):
            load_plain(b"\x80\x02\x82\xf0.")
    finally:
        copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_containers_come_through(protocol: int) -> None:
    """Dicts, lists, pairs, texts of any length and numbers of up to 64 bits are the same afterwards."""
    value = {
        **small_job(),
        "texts": ["", "x" * 255, "x" * 256, "x" * 70_000, "é", "\U0001f600"],
        "numbers": [0, 255, 256, 65_536, -1, 2**31, -(2**63), 2**64 - 1, 1.5, True, False, None],
        "pair": (1, 2**40),
        "empty": [[], {}],
    }
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_long_lists_of_one_kind_come_through(protocol: int) -> None:
    """However long a row of numbers, texts, dicts or empty lists is."""
    many = 250_000
    shared = {"a": 1}
    value = [
        list(range(many)),
        [shared] * many,
        [{"key": number, "more": "text"} for number in range(many)],
        [str(number) for number in range(many)],
        ["x" * 300] * many,
        [(0, 1)] * many,
    ]
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.timeout(120)  # seconds, or hours
def test_checking_takes_time_in_proportion() -> None:
    """What is half made, again and again, is not looked at again and again: megabytes take seconds at most."""
    row = b"h\0" * 10
    for piece in (b"}(" + row, b"](" + row, b"}(" + row + b"](" + row + b"}(" + row, b"]" + row, b"X\0\0\0\0", b"("):
        with contextlib.suppress(RefusedError):
            load_plain(FRAMED + piece * (2_000_000 // len(piece)) + b".")


def test_shared_objects_stay_one() -> None:
    """Frames are shared hundreds of thousands of times; each is one object still."""
    frame = {"filename": "train.py"}
    loaded = load_plain(pickle.dumps([[frame], [frame]], 4))
    assert loaded[0][0] is loaded[1][0]


def test_a_list_that_holds_itself_does_not_hang(tmp_path: Path) -> None:
    """Lists in circles, and lists that would be endless written out, are only ever looked at by key."""
    circle: list[Any] = []
    circle.append(circle)
    doubled: Any = "x"
    for _ in range(30):
        doubled = [doubled, doubled]
    file = tmp_path / "snapshot.pickle"
    entry = {"action": doubled, "addr": 1, "size": 1, "frames": doubled, "pool_id": doubled}
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry, entry]], "more": circle}, 4))
    imported = import_file(file)
    assert imported.devices[0]["entries"] == 2


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    """A snapshot is read without torch, and without ever loading what it names."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(small_job(), 4))
    program = (
        "import sys\nfrom memprof.trace.importers.importing import import_file\n"
        f"import_file({str(file)!r})\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_page_that_holds_a_malicious_pickle_is_refused(tmp_path: Path) -> None:
    """The snapshot inside a memory_viz page is trusted no more than a pickle file."""
    data = base64.b64encode(pickle.dumps(Reduced(os.system, "true"), 4)).decode()
    file = tmp_path / "page.html"
    file.write_text(f'<script>const local_files = [{{"name": "s", "base64": "{data}"}}]</script>')
    with pytest.raises(BadInputError, match=r"imports posix\.system"):
        import_file(file)
