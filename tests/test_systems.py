"""Other systems than Linux, and how much memory a process may allocate, by the system's files."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.launch.parent.target import ANY_SYSTEM, CannotStartError, Target
from memprof.machines.host_limits import HostLimit, cgroup_limit, machine_memory, nearest_limit

ROOT = Path(__file__).parent.parent


RUN = ROOT / "sample_traces" / "gpt" / "run.memprof"


# Others' packages are imported before: those for this system need its modules.
_READ = """
import os, signal, sys
import numpy, pandas, psutil, pyarrow.parquet, rich.console, scipy.optimize, scipy.sparse, subprocess, tempfile
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # an import of it fails, as where it does not exist
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "setsid"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGXFSZ"):
    delattr(signal, name)
from memprof.cli.main import main
run = sys.argv[1]
for words in (
    ["report", run],
    ["report", run, "--html", "report.html"],
    ["suggest", run, "--budget", "60%", "--time-limit", "2", "--write", "plan.toml"],
    ["predict", run, "--plan", "plan.toml"],
    ["diff", run, run],
    ["export", run, "--to", "summary", "-o", "summary.json"],
    ["export", run, "--to", "snapshot", "-o", "snapshot.pickle"],
    ["import", "snapshot.pickle", "-o", "imported.memprof"],
):
    status = main(words)
    assert status == 0, (words, status)
"""


def test_recordings_are_read_without_linux(tmp_path: Path) -> None:
    """Reports, plans, comparisons, exports and imports need none of the modules and functions that Windows lacks."""
    done = subprocess.run([sys.executable, "-c", _READ, str(RUN)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "88.92 MiB" in done.stdout


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_recording_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    """A job is not started, and the sentence says what does work; a variable allows it."""
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(CannotStartError, match=rf"^recording needs Linux; on {name}, memprof reads") as caught:
        Target(("python", "train.py"), "train.py")
    assert caught.value.exit_code == 125
    monkeypatch.setenv(ANY_SYSTEM, "1")
    assert Target(("python", "train.py"), "train.py").name == "train.py"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 8 GiB, of which 6 GiB can be had, and a process of 1 GiB of address space."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n")
    (folder / "self" / "statm").write_text(f"{(1 << 30) // resource.getpagesize()} 1 1 1 0 1 0\n")
    (folder / "self" / "cgroup").write_text("0::/outer/job\n")
    return folder


def test_machine_without_other_limits(proc: Path, tmp_path: Path) -> None:
    """Where nothing else limits a process, the machine's memory does."""
    assert machine_memory(proc) == HostLimit(8 << 30, 6 << 30)
    assert cgroup_limit(proc, tmp_path / "none") is None
    assert nearest_limit(proc, tmp_path / "none") == HostLimit(8 << 30, 6 << 30)


def test_group_inside_a_group(proc: Path, tmp_path: Path) -> None:
    """A group has the limits of those around it: the one of which the least is left counts."""
    groups = tmp_path / "cgroup"
    job = groups / "outer" / "job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("100\n")
    (groups / "outer" / "memory.max").write_text(f"{4 << 30}\n")
    (groups / "outer" / "memory.current").write_text(f"{3 << 30}\n")
    assert cgroup_limit(proc, groups) == HostLimit(4 << 30, 1 << 30)
    (proc / "4711").mkdir()
    (proc / "4711" / "cgroup").write_text("0::/\n")
    assert cgroup_limit(proc, groups, 4711) is None  # of another process, its own group counts
    assert nearest_limit(proc, groups) == HostLimit(4 << 30, 1 << 30)


def test_container_sees_its_group_at_the_root(proc: Path, tmp_path: Path) -> None:
    """In a container the path is the host's; the group's own files stand at the root. More used than allowed is 0."""
    groups = tmp_path / "cgroup"
    groups.mkdir()
    (groups / "memory.max").write_text("1000\n")
    (groups / "memory.current").write_text("1001\n")
    assert cgroup_limit(proc, groups) == HostLimit(1000, 0)


def test_files_that_can_be_dropped_are_free(proc: Path, tmp_path: Path) -> None:
    """A group counts the files that its processes read; what the kernel drops first is not in use."""
    groups = tmp_path / "cgroup"
    groups.mkdir()
    (groups / "memory.max").write_text("1000\n")
    (groups / "memory.current").write_text("990\n")
    (groups / "memory.stat").write_text("anon 90\nfile 900\ninactive_file 800\nactive_file 100\n")
    assert cgroup_limit(proc, groups) == HostLimit(1000, 810)


def test_first_version_of_groups(proc: Path, tmp_path: Path) -> None:
    """cgroup v1 keeps memory in a hierarchy of its own, and writes nearly the largest integer for "no limit"."""
    (proc / "self" / "cgroup").write_text("5:cpu:/job\n4:memory,hugetlb:/job\n")
    group = tmp_path / "cgroup" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group / "memory.usage_in_bytes").write_text("5\n")
    assert cgroup_limit(proc, tmp_path / "cgroup") is None
    (group / "memory.limit_in_bytes").write_text("2000\n")
    assert cgroup_limit(proc, tmp_path / "cgroup") == HostLimit(2000, 1995)


def test_nothing_told(tmp_path: Path) -> None:
    """On a system without these files the limits are unknown, and not guessed."""
    assert machine_memory(tmp_path) is None
    assert nearest_limit(tmp_path, tmp_path) is None
