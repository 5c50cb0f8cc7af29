"""Which part of a job's command line a recording contains, and its file permissions."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import memprof
from memprof.cli.main import main
from memprof.launch.dry.dry_job import find_recorded_job
from memprof.launch.parent.target import CannotStartError, find_command
from memprof.trace.store import Trace

MEMPROF = [sys.executable, "-m", "memprof"]

JOB = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise RuntimeError("Cannot allocate memory, password=CANARYerror")
"""

#: memprof's own process, as its record of the launch has it.
KILL_MEMPROF = """
import json, os, signal
with open("run.memprof.spool/launch.json") as launch:
    os.kill(json.load(launch)["parent_pid"], signal.SIGKILL)
"""

CANARIES = [
    *("--password", "CANARYone", "--hf_token=CANARYtwo", "logger.wandb.api_key=CANARYthree"),
    *("https://alice:CANARYfour@host/x", '{"token": "CANARYfive"}', "HF_TOKEN=CANARYsix", "ghp_CANARYseven0123"),
]


def everything_in(path: Path) -> str:
    """Every string of a recording: its manifests, and each text of each table."""
    found = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".parquet"):
                with archive.open(name) as file:
                    table = pq.read_table(file)
                found += [str(row) for row in table.to_pylist()]
                found.append(str(table.schema.metadata))  # texts that are the same in every row
            else:
                found.append(archive.read(name).decode())
    return "\n".join(found)


def modes_below(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


def record(tmp_path: Path, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    (tmp_path / "job.py").write_text(JOB)
    return subprocess.run(
        [*MEMPROF, "record", "-f", "-o", "run.memprof", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        umask=umask,
        check=False,
    )


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    (folder / "run.memprof").touch(0o666)  # an older one, which its owner let everybody read
    done = record(folder, "--", "bash", "-c", 'PASSWORD=CANARYzero "$0" "$@"', sys.executable, "job.py", "6", *CANARIES)
    assert done.returncode == 1, done.stderr
    return folder / "run.memprof"


def test_a_recording_holds_no_secret(masked: Path) -> None:
    """Not in its manifest, not in a table, not in the error that the job ended with; the rest is as it was typed."""
    text = everything_in(masked)
    assert "CANARY" not in text
    command = Trace.open(masked).manifest.command
    assert command[:2] == ("bash", "-c")
    assert command[4:7] == ("job.py", "6", "--password")
    assert "password=***" in text


def test_a_recording_is_its_owners_alone(masked: Path) -> None:
    """Regardless of the umask, and of the permissions of a file that it replaces."""
    assert stat.S_IMODE(masked.stat().st_mode) == 0o600


def test_a_masked_command_line_starts_no_job(masked: Path) -> None:
    """A dry run of the recorded job would be given the mask as its password."""
    with pytest.raises(CannotStartError, match="--keep-arguments"):
        find_recorded_job(Trace.open(masked).manifest)


def test_keep_arguments_keeps_them(tmp_path: Path) -> None:
    """The command line is unmasked, and its file still readable only by the owner."""
    record(tmp_path, "--keep-arguments", "job.py", "6", *CANARIES, umask=0)
    assert Trace.open(tmp_path / "run.memprof").manifest.command[3:] == tuple(CANARIES)
    assert stat.S_IMODE((tmp_path / "run.memprof").stat().st_mode) == 0o600


@pytest.mark.parametrize("light", [False, True])
def test_a_spool_is_its_owners_alone(tmp_path: Path, light: bool) -> None:
    """So is what is there while the job runs, and stays where memprof is killed; without secrets in its files."""
    (tmp_path / "job.py").write_text(JOB.replace("raise", f"{KILL_MEMPROF}\n#"))
    words = ["--light"] if light else ["--steps", "1"]
    subprocess.run(
        [*MEMPROF, "record", "-o", "run.memprof", *words, "job.py", "6", *CANARIES],
        cwd=tmp_path,
        capture_output=True,
        umask=0,
        check=False,
    )
    spool = tmp_path / "run.memprof.spool"
    modes = modes_below(spool)
    assert set(modes.values()) == {0o600, 0o700}, modes
    assert {name for name, mode in modes.items() if mode == 0o700} >= {spool.name}
    for path in spool.rglob("*"):
        assert path.is_dir() or b"CANARY" not in path.read_bytes(), path


def test_a_recording_in_code_is_masked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`with memprof.record(...)` writes the program's own arguments."""
    import torch

    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "CANARY"])
    for keeps in (False, True):
        with memprof.record(tmp_path / f"{keeps}.memprof", skip=0, steps=1, keep_arguments=keeps):
            torch.ones(4).sum()
        shown = "CANARY" if keeps else "***"
        assert Trace.open(tmp_path / f"{keeps}.memprof").manifest.command == ("train.py", "--token", shown)


def test_what_holds_arguments_is_private_and_what_is_shared_is_not(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports and pages are their owner's; a summary, which is committed, and a scrubbed page are ordinary files."""
    monkeypatch.chdir(tmp_path)

    def made_by(*words: str, name: str) -> dict[str, int]:
        before = os.umask(0o022)
        try:
            assert main(list(words)) == 0
        finally:
            os.umask(before)
        return modes_below(tmp_path / name)

    run = str(masked)
    assert set(made_by("export", run, "--to", "csv", "-o", "tables", name="tables").values()) == {0o600, 0o700}
    for kind in ("perfetto", "speedscope", "snapshot"):
        assert made_by("export", run, "--to", kind, "-o", kind, name=kind) == {kind: 0o600}
    assert made_by("report", run, "--html", "a.html", name="a.html") == {"a.html": 0o600}
    assert made_by("report", run, "--html", "b.html", "--scrub", name="b.html") == {"b.html": 0o644}
    assert made_by("export", run, "--to", "summary", "-o", "s.json", name="s.json") == {"s.json": 0o644}
    assert "CANARY" not in (tmp_path / "s.json").read_text()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bash", "-c", "TOKEN=x python train.py --lr 1"], "train.py"),
        (["bash", "-c", "cd /job && python3 -u ./t.py"], "./t.py"),
        (["bash", "-c", "TOKEN=x python -m package.train"], "package.train"),
        (["bash", "-c", "TOKEN=x ./train.py"], "./train.py"),
        (["bash", "train.py"], "train.py"),
    ],
)
def test_a_job_is_named_after_its_script(words: list[str], name: str) -> None:
    """The name, which the default output file is called after, is never a whole program of a shell."""
    if os.name == "posix":
        assert find_command(words).name == name
