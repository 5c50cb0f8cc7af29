"""Jobs of unseen/jobs.toml: scripts by others from a folder of checkouts, and some of ours in their style.

python lab/benchmarks/unseen_jobs.py FOLDER | sh     # fills a folder with the checkouts; needs a network
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that lab.* is found however this file is started

from lab.benchmarks.recording import environment

FOLDER = Path(__file__).parent / "unseen"
#: The environment variable that names the folder of checkouts.
CHECKOUTS = "UNSEEN_CHECKOUTS"
#: Of a checkout, what no job needs.
UNUSED = (".git", "assets", "docs")
LIMIT_S = 300
#: What a script prints that changes from run to run: times, rates, dates, folders.
CHANGING = re.compile(
    r"[\d.]+ ?(?:ms|s|sec|it/s|s/it)\b|\d+:\d\d(?::\d\d)?|(?:SPS|Time|time|runtime|step took)\W+[\d.]+|ms/batch +[\d.]+"
    r"|__\d{10}|/tmp/\S+|\d{4}-\d\d-\d\d(?:[_T ]\d\d[-:]\d\d[-:]\d\d)?"
)


@dataclass(frozen=True)
class Job:
    """An entry of jobs.toml.

    Attributes:
        name: Short name.
        kind: Kind of job.
        folder: Folder of the checkout in which the command runs; ``own`` for those written for this table.
        command: The script and its arguments.
        repository: ``owner/name`` on GitHub; empty where the script is ours.
        commit: The commit that was run.
        licence: The repository's.
        packages: Distributions that must be installed.
        stand_ins: Folders of unseen/stand_ins on its path.
        data: Arguments of unseen/make_data.py, which creates the script's input.
        paths: Folders on its path: of its own checkout, or other repositories as ``owner/name@commit``.
        environment: Further variables.
        seeded: Whether it prints the same in every run.
    """

    name: str
    kind: str
    folder: str
    command: str
    repository: str = ""
    commit: str = ""
    licence: str = ""
    packages: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    seeded: bool = True

    def lacks(self, checkouts: Path | None) -> str:
        """Returns why it cannot run here; empty if it can.

        Args:
            checkouts: Folder of checkouts, each named ``owner+name``.
        """
        repositories = [name for name in (self.repository, *self.paths) if "/" in name]
        for name in repositories:
            if checkouts is None or not _checkout(checkouts, name).is_dir():
                return f"no checkout of {name.partition('@')[0]}"
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return f"{package} is not installed"
        return ""


@dataclass(frozen=True)
class Prepared:
    """A job in its own folder, with its data.

    Attributes:
        folder: Where it runs.
        command: The script and its arguments.
        variables: Its environment.
    """

    folder: Path
    command: tuple[str, ...]
    variables: dict[str, str]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Runs it to its end: as it is, or under ``memprof record`` where options of that are given."""
        memprof = ("-P", "-m", "memprof.cli.main", "record", "-f", *options) if options else ()
        command = [sys.executable, *memprof, *self.command]
        try:
            return subprocess.run(
                command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"memprof: it ran for {LIMIT_S} s")


def read_jobs() -> list[Job]:
    """Returns the jobs of jobs.toml."""
    jobs = tomllib.loads((FOLDER / "jobs.toml").read_text(encoding="utf-8"))["job"]
    return [
        Job(**{key: tuple(value) if isinstance(value, list) else value for key, value in job.items()}) for job in jobs
    ]


def prepare(job: Job, checkouts: Path | None, folder: Path) -> Prepared:
    """Copies a job's files into a folder, and creates its data there.

    Args:
        job: The job; it lacks nothing.
        checkouts: Folder of checkouts.
        folder: Where a folder of the job's name is made.
    """
    root = folder / job.name
    if job.repository:
        assert checkouts is not None
        shutil.copytree(_checkout(checkouts, job.repository), root, ignore=shutil.ignore_patterns(*UNUSED))
        place = root / job.folder
    else:
        shutil.copytree(FOLDER / job.folder, root)
        place = root
    for line in job.data:
        subprocess.run([sys.executable, str(FOLDER / "make_data.py"), *line.split()], cwd=place, check=True)
    paths = [str(FOLDER / "stand_ins" / name) for name in job.stand_ins]
    paths += [str(_checkout(checkouts, name) if checkouts and "/" in name else root / name) for name in job.paths]
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "disabled"}
    return Prepared(place, tuple(shlex.split(job.command)), environment(**changes, **job.environment))


def losses_of(stdout: str) -> list[str]:
    """Returns what a job printed, without what changes from run to run."""
    return CHANGING.sub("", stdout.rpartition("\r")[2] if "\r" in stdout else stdout).split()


def _checkout(checkouts: Path, repository: str) -> Path:
    return checkouts / repository.partition("@")[0].replace("/", "+")


def clone_commands(jobs: list[Job], folder: str) -> list[str]:
    """Returns the commands that fill a folder with the checkouts that jobs need."""
    needed = {f"{job.repository}@{job.commit}" for job in jobs if job.repository}
    needed |= {path for job in jobs for path in job.paths if "/" in path}
    commands = []
    for name, _, commit in sorted(repository.partition("@") for repository in needed):
        place = shlex.quote(str(_checkout(Path(folder), name)))
        commands.append(f"git clone -q https://github.com/{name} {place} && git -C {place} checkout -q {commit}")
    return commands


if __name__ == "__main__":
    print("\n".join(clone_commands(read_jobs(), sys.argv[1] if len(sys.argv) > 1 else "checkouts")))
