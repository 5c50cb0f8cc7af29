"""Variables and settings that change a job's memory or how it is recorded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from memprof.errors import UsageError
from memprof.launch.doctor.findings import FIX, NOTE, OK, Finding
from memprof.launch.parent.settings import read_project_settings
from memprof.policies.allocator.policy import OLD_VARIABLE, VARIABLE

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
    """Lists memprof's settings from ``MEMPROF_*`` and the nearest pyproject.toml, and misspelled ones.

    Args:
        environment: The environment.
        folder: The current folder.
    """
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
