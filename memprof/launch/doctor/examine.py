"""Checks everything that determines whether, and how completely, a job can be recorded here."""

from __future__ import annotations

import difflib
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

from memprof.errors import UsageError
from memprof.launch.doctor.findings import FAIL, FIX, MISSING, NOTE, OK, Examination, Finding, Section
from memprof.launch.doctor.torch_check import check_recording, check_torch
from memprof.launch.parent.settings import read_project_settings
from memprof.machines.host_limits import nearest_limit
from memprof.policies.allocator.policy import OLD_VARIABLE, VARIABLE
from memprof.units import format_bytes
from memprof.version import __version__

#: Variables that change how much memory a job takes, with their effect.
MEANINGS = {
    VARIABLE: "options of the caching allocator",
    OLD_VARIABLE: "options of the caching allocator, by the name it had before torch 2.9",
    "PYTORCH_HIP_ALLOC_CONF": "options of the caching allocator, by ROCm's name",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "turns the caching allocator off: reserved memory is what is allocated",
    "CUBLAS_WORKSPACE_CONFIG": "size of cuBLAS workspaces, per stream",
    "CUDA_VISIBLE_DEVICES": "which devices the job sees",
    "CUDA_MODULE_LOADING": "when kernels are loaded, which takes device memory outside torch's allocator",
    "CUDA_LAUNCH_BLOCKING": "kernels run one by one: recorded times are longer",
    "NCCL_BUFFSIZE": "size of NCCL's buffers per channel, outside torch's allocator",
    "LD_PRELOAD": "libraries loaded first; another malloc changes resident memory, not torch's counts",
    "GLIBC_TUNABLES": "how malloc works: changes resident memory, not torch's counts",
    "OMP_NUM_THREADS": "threads of kernels on the CPU, each with scratch memory of its own",
    "MKL_NUM_THREADS": "threads of MKL's kernels, each with scratch memory of its own",
    "PYTHONMALLOC": "how Python takes its memory: changes resident memory, not torch's counts",
}
_PREFIXES = {"MALLOC_": "how malloc works: changes resident memory, not torch's counts"}

#: Variables that memprof reads; the first ones are also keys of [tool.memprof].
_SETTINGS = (
    *("OUTPUT", "FORCE", "QUIET", "SKIP", "STEPS", "STOP", "LIGHT", "DRY_RUN", "DEVICE", "STRICT", "PLAN", "BUDGET"),
)
_OWN = tuple(
    f"MEMPROF_{name}"
    for name in (
        *_SETTINGS,
        "RANKS",
        "NODES",
        "EXPERT_LOAD",
        "VALUES_FROM",
        "WHOLE",
        "FAIL_OVER_BUDGET",
        "KEEP_ARGUMENTS",
        "FORK_RANKS",
        "ANY_SYSTEM",
        "DEBUG",
    )
)
#: Variables that a recording sets for its job: present if doctor runs inside one.
_OF_A_JOB = ("MEMPROF_SPOOL", "MEMPROF_SETTINGS", "MEMPROF_PACKAGE")
#: Variables set by tests and continuous integration.
_OF_TESTS = ("MEMPROF_BROWSER_TESTS",)


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Lists the variables in force that change a job's memory."""
    found = []
    for name in sorted(environment):
        meaning = MEANINGS.get(name) or next((text for start, text in _PREFIXES.items() if name.startswith(start)), "")
        if meaning and environment[name]:
            found.append(Finding(NOTE, name, f"{environment[name]} ({meaning})"))
    if environment.get(VARIABLE) and environment.get(OLD_VARIABLE, environment[VARIABLE]) != environment[VARIABLE]:
        advice = f"Unset {OLD_VARIABLE}: which of the two counts depends on torch's version."
        found.append(Finding(FIX, "allocator options", f"{VARIABLE} and {OLD_VARIABLE} differ", advice))
    return found or [Finding(OK, "variables", "none set that changes a job's memory")]


def check_settings(environment: Mapping[str, str], folder: Path) -> list[Finding]:
    """Lists memprof's settings from ``MEMPROF_*`` and the nearest pyproject.toml, and misspelled ones."""
    found = []
    for name in sorted(environment):
        if not name.startswith("MEMPROF_") or name in _OF_TESTS or not environment[name]:
            continue
        if name in _OWN:
            found.append(Finding(NOTE, name, environment[name]))
        elif name in _OF_A_JOB:
            found.append(Finding(NOTE, name, "set by a recording around this process"))
        else:
            near = difflib.get_close_matches(name, _OWN, n=1)
            advice = f"Did you mean {near[0]}?" if near else f"Unset it, or use one of {', '.join(_OWN)}."
            found.append(Finding(FIX, name, "is not a variable that memprof reads", advice))
    try:
        for key, value in read_project_settings(folder).items():
            over = f" (MEMPROF_{key.upper()} overrides it)" if environment.get(f"MEMPROF_{key.upper()}") else ""
            found.append(Finding(NOTE, f"[tool.memprof] {key}", f"{value}{over}"))
    except UsageError as error:
        found.append(Finding(FIX, "[tool.memprof]", "cannot be read", str(error)))
    return found or [Finding(OK, "settings", "none: memprof's own defaults are in force")]


def output_folder(environment: Mapping[str, str], folder: Path) -> Path:
    """Returns the output folder: from ``MEMPROF_OUTPUT`` or ``[tool.memprof]``, or else the current folder."""
    from memprof.trace.files.reading import is_address

    try:
        output = environment.get("MEMPROF_OUTPUT") or read_project_settings(folder).get("output", "")
    except UsageError:
        output = ""
    return folder if not output or is_address(output) else (folder / output).parent


def examine(folder: Path, environment: Mapping[str, str], *, is_quick: bool = False) -> Examination:
    """Examines the environment of a job recorded from a folder."""
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
    """Writes a test file to the output folder, and removes it."""
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


_PACKAGE = "torch-memprof"
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
        lines = importlib.metadata.requires(_PACKAGE) or []
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
