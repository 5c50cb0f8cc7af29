"""`memprof doctor`: in this environment, and in others created for the tests, it reports what works and what to fix."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from memprof.launch.doctor.examine import (
    OPTIONAL,
    check_libraries,
    check_output,
    check_settings,
    check_shared_memory,
    check_variables,
    judge_disk,
    output_folder,
)
from memprof.launch.doctor.findings import FAIL, FIX, MISSING, NOTE, OK, Examination, Finding, Section
from memprof.launch.doctor.torch_check import judge_report
from memprof.launch.torch_versions import NEWEST, OLDEST, as_numbers

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def clean() -> dict[str, str]:
    """This environment without what would change the answers."""
    names = ("MEMPROF_", "PYTORCH_", "MALLOC_", "OMP_", "MKL_", "LD_PRELOAD", "CUDA_", "COLUMNS", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def doctor(python: Path | str, folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "memprof", "doctor", *words]
    environment = {**clean(), **more}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


def found(done: subprocess.CompletedProcess[str], what: str) -> dict[str, str]:
    """Returns one finding of ``doctor --json``."""
    assert done.stderr == ""
    sections: list[dict[str, Any]] = json.loads(done.stdout)["sections"]
    (finding,) = [one for section in sections for one in section["findings"] if one["what"] == what]
    assert isinstance(finding, dict)
    return finding


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("here")
    return folder, doctor(sys.executable, folder, "--json")


def test_recording_works_here(here: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """It records a job and reads it back to the byte, leaves no files, and exits with 0."""
    folder, done = here
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert (told["schema"], told["works"], told["quick"]) == (1, True, False)
    levels = {one["level"] for section in told["sections"] for one in section["findings"]}
    assert levels <= {OK, NOTE, MISSING, FIX, FAIL}
    assert found(done, "self-test")["level"] == OK
    assert "exact to the byte" in found(done, "self-test")["says"]
    assert found(done, "CPU memory")["says"].endswith("(cpu-native)")
    assert found(done, "torch")["level"] in (OK, NOTE)
    assert told["torch"]["version"].startswith(found(done, "torch")["says"].partition(",")[0])
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with everything that this one has but torch and dash; returns its Python."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    own = Path(pytest.__file__).parents[1]
    for entry in own.iterdir():
        if not entry.name.lower().startswith(("torch", "dash", "__pycache__", "functorch")):
            (site / entry.name).symlink_to(entry)
    for name in ("torch_memprof", "_torch_memprof"):
        for entry in own.glob(f"{name}*"):
            if not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    (site / "memprof-source.pth").write_text(f"{ROOT}\n{ROOT / 'dashboard'}\n")
    return folder / "bin" / "python"


@pytest.fixture
def torch_folder(other: Path) -> Any:
    """Where a torch would be installed in that environment; what a test puts there goes away again."""
    (site,) = other.parents[1].glob("lib/python3*/site-packages")
    yield site
    for entry in site.glob("torch*"):
        if not entry.is_symlink():
            shutil.rmtree(entry)


def test_without_torch(other: Path, tmp_path: Path) -> None:
    """Missing torch is reported with install instructions; recording is impossible, and the exit code is 3."""
    done = doctor(other, tmp_path, "--json")
    assert done.returncode == 3
    torch = found(done, "torch")
    assert torch["level"] == FAIL
    assert "not installed" in torch["says"]
    assert "pip install 'torch-memprof[torch]'" in torch["advice"]
    assert "self-test" not in [section["name"] for section in json.loads(done.stdout)["sections"]]


def test_without_an_optional_library(other: Path, tmp_path: Path) -> None:
    """Doctor names it with what it is for; its verb has help all the same, and says what to install when it runs."""
    done = doctor(other, tmp_path, "--quick", "--json")
    assert (found(done, "dash")["level"], found(done, "dash")["says"]) == (MISSING, "not installed: memprof dashboard")
    assert "torch-memprof[dashboard]" in found(done, "dash")["advice"]
    for words, status, stream in ((["-h"], 0, "stdout"), (["run.memprof"], 2, "stderr")):
        command = [str(other), "-m", "memprof", "dashboard", *words]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean(), timeout=60)
        assert ran.returncode == status
        assert ("Usage" if status == 0 else "pip install 'torch-memprof[dashboard]'") in getattr(ran, stream)


def install_torch(site: Path, version: str, code: str) -> None:
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(code)
    (site / f"torch-{version}.dist-info").mkdir()
    (site / f"torch-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )


def test_a_torch_that_is_too_old(other: Path, torch_folder: Path, tmp_path: Path) -> None:
    """A library is detected by its version, without importing it."""
    install_torch(torch_folder, "1.13.1", "raise SystemExit('imported')")
    done = doctor(other, tmp_path, "--json")
    assert done.returncode == 3
    assert found(done, "torch")["says"] == "1.13.1 is too old"
    assert f"torch {OLDEST} or newer" in found(done, "torch")["advice"]


@pytest.mark.cold
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import os; os._exit(0)", "without any output"),
    ],
    ids=["import error", "crash", "silent end"],
)
def test_a_torch_that_is_broken(code: str, says: str, other: Path, torch_folder: Path, tmp_path: Path) -> None:
    """However torch fails to be imported, doctor goes on and says how."""
    install_torch(torch_folder, NEWEST + ".0", code)
    done = doctor(other, tmp_path, "--quick", "--json")
    assert done.returncode == 3
    assert says in found(done, "torch")["says"]
    assert found(done, "recordings")["level"] == OK


def test_a_place_that_cannot_be_written(other: Path, tmp_path: Path) -> None:
    """Where recordings go by MEMPROF_OUTPUT: /proc takes no files, even of root's."""
    done = doctor(other, tmp_path, "--quick", "--json", MEMPROF_OUTPUT="/proc/run.memprof")
    assert done.returncode == 3
    recordings = found(done, "recordings")
    assert recordings["level"] == FAIL
    assert "/proc" in recordings["says"]
    assert check_output(tmp_path / "nowhere").level == FAIL


@pytest.mark.parametrize(("options", "reason"), [("size=64k", "No space left"), ("ro", "Read-only file system")])
def test_a_disk_that_is_full_or_read_only(options: str, reason: str, tmp_path: Path) -> None:
    """A file system of 64 KiB, and one that cannot be written."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    script = (
        "import sys; from pathlib import Path; from memprof.launch.doctor.examine import check_output; "
        "place = Path(sys.argv[1]); found = check_output(place); print(found.level, found.says, *place.iterdir())"
    )
    mount = 'mount -t tmpfs -o "$1" tmpfs "$2" || exit 77; exec "$3" -c "$4" "$2"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", options]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    done = subprocess.run([*command, str(mounted), sys.executable, script], capture_output=True, text=True, cwd=ROOT)
    if done.returncode in (1, 77) and "memprof" not in done.stderr:
        pytest.skip(f"this system lets nobody mount: {done.stderr.strip()}")
    assert (
        done.stdout
        == f"fail nothing can be written to {mounted} ({reason}{' on device' if 'size' in options else ''})\n"
    )


def test_little_room_is_told() -> None:
    """Below a gigabyte of disk there is something to mend, and recording works."""
    assert judge_disk(Path("/x"), (1 << 30) - 1).level == FIX
    assert judge_disk(Path("/x"), 1 << 30).level == OK


def test_shared_memory(tmp_path: Path) -> None:
    """Where there is none, that is a note: one process records without."""
    assert check_shared_memory(tmp_path / "shm").level == NOTE


def test_variables_that_change_memory() -> None:
    """Each is named with its value and what it does; two that contradict each other are to be mended."""
    environment = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "4", "LD_PRELOAD": "/x.so", "HOME": "/", "LD_AUDIT": "x"}
    said = check_variables(environment)
    assert [finding.what for finding in said] == ["LD_PRELOAD", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS"]
    assert said[1].says.startswith("2 (how malloc works")
    both = {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}
    assert [finding.level for finding in check_variables(both)] == [NOTE, NOTE, FIX]
    assert [finding.level for finding in check_variables({**both, "PYTORCH_CUDA_ALLOC_CONF": "a:1"})] == [NOTE, NOTE]
    assert [finding.level for finding in check_variables({})] == [OK]


def test_settings_in_force(tmp_path: Path) -> None:
    """Those of the environment and of pyproject.toml, and which of two counts; misspelt ones are answered."""
    (tmp_path / "pyproject.toml").write_text("[tool.memprof]\nsteps = 5\noutput = 'runs/x.memprof'\n")
    said = {one.what: one for one in check_settings({"MEMPROF_STEPS": "2", "MEMPROF_STEP": "3"}, tmp_path)}
    assert said["MEMPROF_STEPS"].says == "2"
    assert said["[tool.memprof] steps"].says == "5 (MEMPROF_STEPS overrides it)"
    assert (said["MEMPROF_STEP"].level, said["MEMPROF_STEP"].advice) == (FIX, "Did you mean MEMPROF_STEPS?")
    assert output_folder({}, tmp_path) == tmp_path / "runs"
    (tmp_path / "pyproject.toml").write_text("[tool.memprof]\nstps = 5\n")
    (broken,) = check_settings({}, tmp_path)
    assert broken.level == FIX
    assert "Did you mean steps?" in broken.advice


def test_what_memprof_reads_is_known() -> None:
    """Every MEMPROF_ variable of `record` is one of those that doctor knows: none is called misspelt."""
    from memprof.cli.verbs.record import record

    names = {param.envvar for param in record.params if isinstance(param.envvar, str)}
    said = check_settings(dict.fromkeys(names, "1"), Path("/"))
    assert {finding.what for finding in said if finding.level == NOTE} == names


def test_libraries() -> None:
    """Those that are missing are named with what they are for; those memprof needs are one line."""
    said = {finding.what: finding for finding in check_libraries()}
    assert "numpy" in said["needed"].says
    assert {library.name for library in OPTIONAL} == set(said) - {"needed"}
    for finding in said.values():
        assert (finding.level == MISSING) == bool(finding.advice)


def test_supported_versions_are_the_projects() -> None:
    """The oldest torch is that of pyproject.toml, the newest that of constraints.txt."""
    assert PROJECT["optional-dependencies"]["torch"] == [f"torch>={OLDEST}"]
    (pinned,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert as_numbers(OLDEST) <= as_numbers(pinned.partition("==")[2]) <= as_numbers(NEWEST)
    page = (Path(__file__).parents[2] / "docs" / "torch-versions.md").read_text().partition("## Python")[0]
    rows = re.findall(r"^\| (\d+\.\d+\.\d+(?:, \d+\.\d+\.\d+)*) \|", page, re.MULTILINE)
    tried = sorted((one.rpartition(".")[0] for row in rows for one in row.split(", ")), key=as_numbers)
    assert (tried[0], tried[-1]) == (OLDEST, NEWEST)
    assert as_numbers("2.9.1+cu130") < as_numbers("2.11") < as_numbers("3.0a0")


def test_a_recording_that_is_wrong_fails() -> None:
    """The self-test checks exact bytes: a missing parameter fails it."""
    report = {
        "at_peak": {"by_category": {"parameter": 16384, "gradient": 16384}},
        "peak": {"allocated_bytes": 40000},
        "machine": {"device_name": "a processor"},
    }
    assert judge_report(report, 1.0).level == OK
    report["at_peak"]["by_category"]["gradient"] = 16380  # type: ignore[index]
    assert judge_report(report, 1.0).level == FAIL


def test_the_page_says_it_in_words(here: tuple[Path, subprocess.CompletedProcess[str]], other: Path) -> None:
    """The last line is the verdict; nothing a variable holds reaches the terminal as it is; no colours in a pipe."""
    folder, _ = here
    done = doctor(other, folder, "--quick", OMP_NUM_THREADS="4\x1b[31m")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "Recording does not work here; 1 thing to fix, marked above."
    assert "\x1b" not in done.stdout
    assert "4\\x1b[31m" in done.stdout


def test_works_unless_something_fails() -> None:
    """What is to be mended does not stop a recording; what fails does."""
    assert Examination((Section("a", (Finding(FIX, "x", "y"),)),), True).works
    assert not Examination((Section("a", (Finding(FAIL, "x", "y"),)),), True).works
