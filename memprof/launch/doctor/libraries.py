"""Which libraries are installed, their versions, and what each one is for."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from memprof.launch.doctor.findings import FIX, MISSING, OK, Finding

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
_DISTRIBUTED = "pip install 'torch-memprof[distributed]'"
OPTIONAL = (
    Library("dash", "memprof dashboard", _DASHBOARD),
    Library("plotly", "figures of the dashboard and of report --html", _DASHBOARD),
    Library("fsspec", "recordings at addresses, such as s3://", _REMOTE),
    Library("universal-pathlib", "recordings at addresses", _REMOTE),
    Library("dask", "very many ranks, on several workers", _DISTRIBUTED),
    Library("distributed", "very many ranks, on several workers", _DISTRIBUTED),
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
