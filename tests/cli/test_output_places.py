"""Output locations of every command: no command replaces a device, a pipe, a socket or a folder."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from memprof.cli.main import main

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"

#: Every verb that writes a file, and whether it can write through a device or a pipe.
WRITERS = {
    "summary": (("export", "run.memprof", "--to", "summary", "-o"), True),
    "diff": (("diff", "run.memprof", "run.memprof", "--format", "json", "-o"), True),
    "perfetto": (("export", "run.memprof", "--to", "perfetto", "-f", "-o"), True),
    "speedscope": (("export", "run.memprof", "--to", "speedscope", "-f", "-o"), True),
    "snapshot": (("export", "run.memprof", "--to", "snapshot", "-f", "-o"), True),
    "csv": (("export", "run.memprof", "--to", "csv", "--tables", "steps", "-f", "-o"), False),
    "html": (("report", "run.memprof", "-f", "--html"), True),
    "predict": (("predict", "run.memprof", "--optimizer", "loop", "-f", "-o"), True),
    "predict --write": (("predict", "run.memprof", "--optimizer", "loop", "-f", "--write"), True),
    "suggest --write": (("suggest", "run.memprof", "--budget", "90%", "-f", "--write"), True),
    "largest --write": (("largest", "run.memprof", "--budget", "90%", "-f", "--time-limit", "1", "--write"), True),
    "devices --write": (("devices", "run.memprof", "--budget", "90%", "-f", "--write"), True),
    "emit": (("emit", "plan.toml", "--to", "pytorch", "-f", "-o"), True),
    "import": (("import", "snapshot.pickle", "-f", "-o"), True),
    "record": (("record", "-f", "-o"), False),
    "fit": (("fit", "--budget", "1GiB", "-f", "-o"), False),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "run.memprof")
    Path("plan.toml").write_text("[checkpoint]\nmodules = ['rnn']\n")
    Path("job.py").write_text("print('never run')\n")
    assert main(["export", "run.memprof", "--to", "snapshot", "-o", "snapshot.pickle"]) == 0
    return tmp_path


def typed(verb: str, output: str) -> list[str]:
    words, _ = WRITERS[verb]
    return [*words, output, *(["job.py"] if verb in ("record", "fit") else [])]


@pytest.mark.parametrize("verb", WRITERS)
def test_no_verb_replaces_what_is_no_file(verb: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With -f too, a socket, a folder that holds something and a link to either stay, and one line says why."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    Path("full").mkdir()
    Path("full/kept").write_text("kept")
    Path("link").symlink_to("socket")
    before = {name: os.lstat(name) for name in ("socket", "full", "link")}
    capfd.readouterr()
    for name in before if verb != "fit" else ("socket", "link"):  # a folder is what `fit` writes to
        assert main(typed(verb, name)) in (2, 5, 125)
        told = capfd.readouterr().err
        assert "Traceback" not in told
        assert "internal error" not in told
        assert name in told
    for name, was in before.items():
        now = os.lstat(name)
        assert (name, now.st_mode, now.st_ino) == (name, was.st_mode, was.st_ino)
    assert [path.name for path in Path("full").iterdir()] == ["kept"]
    assert not list(folder.glob("*.spool"))
    assert not list(folder.glob(".memprof-*"))


@pytest.mark.parametrize("verb", WRITERS)
def test_devices_stay(verb: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A node made as /dev/null is: whatever can be streamed is written through it, the rest refused; it stays."""
    if os.geteuid() != 0:
        pytest.skip("only root makes device nodes")
    try:
        os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with Path("null").open("wb"):
            pass
    except PermissionError:
        pytest.skip("no device nodes in this container")
    Path("link").symlink_to("null")
    _, is_streamed = WRITERS[verb]
    before = os.lstat("null")
    for name in ("null", "link"):
        assert (main(typed(verb, name)) == 0) is is_streamed
        assert "Traceback" not in capfd.readouterr().err
    now = os.lstat("null")
    assert (now.st_mode, now.st_ino, now.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert Path("link").is_symlink()
    assert not list(folder.glob("*.spool"))
    assert not list(folder.glob(".memprof-*"))


@pytest.mark.parametrize("verb", WRITERS)
def test_a_missing_folder_is_told(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence, and the exit code of a place that cannot be written."""
    capfd.readouterr()
    assert main(typed(verb, "missing/out")) in (2, 5, 125)
    told = capfd.readouterr().err
    assert "missing" in told
    assert "internal error" not in told
