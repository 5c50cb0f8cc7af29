"""Checks everything that determines whether, and how completely, a job can be recorded here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memprof.launch.doctor.findings import FAIL, FIX, MISSING, NOTE, OK, Examination, Finding, Section
from memprof.launch.doctor.surroundings import check_settings, check_variables, output_folder
from memprof.launch.doctor.torch_check import check_recording, check_torch
from memprof.machines.host_limits import nearest_limit
from memprof.units import format_bytes
from memprof.version import __version__


def examine(folder: Path, environment: Mapping[str, str], *, is_quick: bool = False) -> Examination:
    """Examines the environment of a job recorded from a folder.

    Args:
        folder: The current folder.
        environment: The environment of this process.
        is_quick: Skip the test recording.
    """
    torch_findings, probed = check_torch()
    place = output_folder(environment, folder)
    sections = [
        Section("recording", (*_check_python(), *torch_findings)),
        Section("places", (check_output(place), check_shared_memory(), check_host())),
        Section("libraries", tuple(check_libraries())),
        Section("variables", tuple(check_variables(environment))),
        Section("settings", tuple(check_settings(environment, folder))),
    ]
    can_try = all(finding.level != FAIL for section in sections for finding in section.findings)
    if not is_quick and can_try:
        sections.append(Section("self-test", (check_recording(place, environment),)))
    facts = {
        "memprof_version": __version__,
        "python_version": platform.python_version(),
        "python": sys.executable,
        "system": platform.platform(),
        "torch": probed,
    }
    return Examination(tuple(sections), is_quick, facts)


def _check_python() -> list[Finding]:
    version = f"{platform.python_version()} at {sys.executable}"
    found = [Finding(OK, "Python", version)]
    if sys.platform != "linux":
        found.append(Finding(NOTE, "system", f"{platform.system()}: recordings can be read; recording needs Linux"))
    if sys.flags.no_site:
        # The recorder enters the job through sitecustomize.py, which site imports.
        advice = "Start it without -S; jobs whose Python is started with -S, -I or -E are not recorded."
        found.append(Finding(FIX, "Python", "was started with -S", advice))
    if os.environ.get("PYTHONHOME"):
        found.append(Finding(NOTE, "PYTHONHOME", f"{os.environ['PYTHONHOME']}: jobs of another Python may not start"))
    return found


#: Size of the test file in bytes: more than file systems reserve.
_TRIED_BYTES = 1 << 20
#: A window of a large model's steps takes a few hundred megabytes while recording.
_LITTLE_DISK_BYTES = 1 << 30
#: Shared memory below this is little: gloo, NCCL and data loader workers usually need less.
_LITTLE_SHARED_BYTES = 256 << 20
SHARED = Path("/dev/shm")


def check_output(folder: Path) -> Finding:
    """Writes a test file to the output folder, and removes it.

    Args:
        folder: The folder of the output file.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".memprof-doctor-", dir=folder) as tried,
            (Path(tried) / "spool").open("wb") as file,
        ):
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            FAIL,
            "recordings",
            f"nothing can be written to {folder} ({error.strerror or error})",
            "Free some space there, change to a folder that can be written, or choose another with -o.",
        )
    return judge_disk(folder, free)


def judge_disk(folder: Path, free_bytes: int) -> Finding:
    """Judges the free space of a writable folder."""
    says = f"{folder} can be written, {format_bytes(free_bytes)} free"
    if free_bytes < _LITTLE_DISK_BYTES:
        return Finding(FIX, "recordings", says, "Free some space: a long window of a large job takes a gigabyte.")
    return Finding(OK, "recordings", says)


def check_shared_memory(folder: Path = SHARED) -> Finding:
    """Checks shared memory: ranks and data loader workers need it, memprof does not."""
    if not folder.is_dir():
        return Finding(NOTE, str(folder), "missing: data loader workers and ranks of one machine may need it")
    if not os.access(folder, os.W_OK):
        return Finding(
            FIX, str(folder), "cannot be written", "Data loader workers and ranks of one machine need it: mount it rw."
        )
    free = shutil.disk_usage(folder).free
    says = f"{format_bytes(free)} free, for data loader workers and ranks of one machine"
    if free < _LITTLE_SHARED_BYTES:
        return Finding(FIX, str(folder), says, "Enlarge it; in a container: --shm-size=1g, or --ipc=host.")
    return Finding(OK, str(folder), says)


def check_host() -> Finding:
    """Returns how much host memory a job can use, by the tightest limit."""
    limit = nearest_limit()
    if limit is None:
        return Finding(NOTE, "host memory", "not reported by the system")
    free, total = format_bytes(limit.free_bytes), format_bytes(limit.total_bytes)
    return Finding(OK, "host memory", f"{free} free of the {total} available to a process here")


_OWN = "torch-memprof"
_NEEDED = "required by memprof"


@dataclass(frozen=True)
class Library:
    """A library that memprof uses or supports.

    Attributes:
        name: Its distribution name.
        purpose: What it is used for.
        install: The install command.
    """

    name: str
    purpose: str
    install: str


_DASHBOARD, _REMOTE = "pip install 'torch-memprof[dashboard]'", "pip install 'torch-memprof[remote]'"
OPTIONAL = (
    Library("dash", "memprof dashboard", _DASHBOARD),
    Library("plotly", "figures of the dashboard and of report --html", _DASHBOARD),
    Library("fsspec", "recordings at addresses, such as s3://", _REMOTE),
    Library("universal-pathlib", "recordings at addresses", _REMOTE),
    Library("torchao", "optimizer state in 8 bits", "pip install torchao"),
    Library("bitsandbytes", "optimizer state in 8 bits, on CUDA", "pip install bitsandbytes"),
    Library("transformers", "recording inside its Trainer", "pip install transformers"),
    Library("accelerate", "recording under its launcher and loop", "pip install accelerate"),
    Library("lightning", "recording inside its Trainer", "pip install lightning"),
)


def check_libraries() -> list[Finding]:
    """Checks the required and optional libraries."""
    least = _least_versions()
    needed = [name for name, (_, extra) in least.items() if not extra]
    findings = [
        _judge(Library(name, _NEEDED, f"pip install '{name}>={least[name][0]}'"), least[name][0], is_needed=True)
        for name in needed
    ]
    # Required libraries share one line if all are fine.
    wrong = [finding for finding in findings if finding.level != OK]
    if findings and not wrong:
        versions = ", ".join(f"{finding.what} {finding.says.partition(',')[0]}" for finding in findings)
        findings = [Finding(OK, "needed", versions)]
    optional = [_judge(one, least.get(one.name, ("", ""))[0], is_needed=False) for one in OPTIONAL]
    return [*(wrong or findings), *optional]


def _judge(library: Library, least: str, *, is_needed: bool) -> Finding:
    try:
        version = importlib.metadata.version(library.name)
    except importlib.metadata.PackageNotFoundError:
        says = f"not installed: {library.purpose}"
        return Finding(FIX if is_needed else MISSING, library.name, says, f"Install it with {library.install}.")
    if least and _numbers(version) < _numbers(least):
        says = f"{version} is older than {least}: {library.purpose}"
        return Finding(FIX, library.name, says, f"Upgrade it: pip install '{library.name}>={least}'.")
    return Finding(OK, library.name, f"{version}, {library.purpose}")


def _least_versions() -> dict[str, tuple[str, str]]:
    """Returns each library's minimum version, and the extra that requires it, from memprof's own metadata."""
    try:
        lines = importlib.metadata.requires(_OWN) or []
    except importlib.metadata.PackageNotFoundError:
        return {}  # run from a source tree: no metadata
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*>=\s*([\d.]+)", line)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", line)
        if match and (match[1] not in found or not extra):
            found[match[1]] = (match[2], extra[1] if extra else "")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else ()
