"""The settings of a recording, from the user and from pyproject.toml."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import BadInputError, UsageError
from memprof.trace.files.reading import TEXT_LIMIT_BYTES, is_address, parse_toml, read_text

if TYPE_CHECKING:
    from memprof.policies.plan.plan import Plan


@dataclass(frozen=True)
class Settings:
    """How to record a job.

    Attributes:
        output: File to write, or None for ``<script>.<time>.memprof`` in the current folder.
        address: Upload destination of the file, such as ``s3://bucket/run.memprof``; "" to keep it local.
        force: Overwrite an existing recording.
        quiet: Print no summary when the job ends.
        skip: Steps to skip before the window.
        steps: Steps to record.
        stop: End the job after the window.
        goes_on: Also record steps after the window that have larger inputs than all recorded ones.
        light: Follow the whole run at low overhead instead of recording a window in full.
        dry_run: Run the job on tensors without memory, and end it after the window.
        whole: Dry-run the whole loop, for 2.7 times the time of its first steps at most.
        device: The device that a dry run simulates, a name of the catalogue; "" for the CPU.
        snapshots: Folder where a dry run on a device collects the job's own memory snapshots; None to write them where
            the job says.
        snapshot_name: Name of the snapshot after which the job may end; "" for the first.
        read_values: Values of a recording that a dry run replays, from ``read_values_of``; "" for placeholders.
        survey: File to which a dry run writes the batches of its loaders; it trains on the largest alone.
        survey_s: Time in seconds that reading an epoch may take.
        strict: Raise torch's error where the simulated device is full, instead of counting what is missing.
        ranks: Ranks of a dry run of a distributed script; 0 for a job that is started as it is.
        nodes: Machines, each with the same number of ranks.
        expert_load: In a dry run, tokens that a rank's experts receive, as a multiple of their equal share.
        plan: Plan to run the job under, or None.
        plan_path: File with the plan or a part of it; None if it is made of flags alone.
        keep_arguments: Write the job's command line unmasked, including likely secrets.
        budget_bytes: Maximum live bytes in a step; None without a budget.
        fail_over_budget: Exit with an error status if the job succeeded but exceeded the budget.
    """

    output: Path | None = None
    address: str = ""
    force: bool = False
    quiet: bool = False
    skip: int = 2
    steps: int = 3
    stop: bool = False
    goes_on: bool = False
    light: bool = False
    dry_run: bool = False
    whole: bool = False
    device: str = ""
    snapshots: Path | None = None
    snapshot_name: str = ""
    read_values: str = ""
    survey: Path | None = None
    survey_s: float = 20.0
    strict: bool = False
    ranks: int = 0
    nodes: int = 1
    expert_load: float = 1.0
    plan: Plan | None = None
    plan_path: Path | None = None
    keep_arguments: bool = False
    budget_bytes: int | None = None
    fail_over_budget: bool = False


@dataclass(frozen=True)
class DryWindow:
    """Which steps of a dry run to record: the first creates the optimizer state, later ones are all alike.

    Attributes:
        skip: Steps to skip.
        steps: Steps to record.
        isolate: Whether ``suggest --check`` redirects the job's writes in its folder and cuts off the network.
        is_chosen: Whether the steps were configured; otherwise a check covers those of the recording.
    """

    skip: int = 1
    steps: int = 2
    isolate: bool = True
    is_chosen: bool = False


#: The keys of ``[tool.memprof]``, with their types.
_KEYS: dict[str, type] = {
    "output": str,
    "force": bool,
    "quiet": bool,
    "skip": int,
    "steps": int,
    "stop": bool,
    "light": bool,
    "dry_run": bool,
    "whole": bool,
    "device": str,
    "strict": bool,
    "plan": str,
    "keep_arguments": bool,
    "budget": str,
    "fail_over_budget": bool,
}
#: The keys of ``[tool.memprof.dry_run]``, which replaces the boolean to choose other steps for dry runs.
_DRY_RUN = "dry_run"
_DRY_KEYS: dict[str, type] = {"skip": int, "steps": int, "isolate": bool}
#: The subtable that `memprof diff` reads.
_GATES = "gates"
_LEAST = {"skip": 0, "steps": 1}
_KIND = {str: "a text", bool: "true or false", int: "a whole number"}


def read_project_settings(folder: Path) -> dict[str, Any]:
    """Reads ``[tool.memprof]`` from the nearest pyproject.toml, in this folder or above it.

    Args:
        folder: Where the search starts, usually the current folder.

    Returns:
        The settings given there; a relative output or plan is relative to the folder of the pyproject.toml. The steps
        of dry runs (`read_dry_window`) are not included.

    Raises:
        UsageError: The file is not TOML, or contains an unknown key or an invalid value.
    """
    path = _project_file(folder)
    if path is None:
        return {}
    table = {key: value for key, value in _read(path).items() if key != _GATES}
    if isinstance(table.get(_DRY_RUN), dict):
        _dry_window(path, table.pop(_DRY_RUN))
    settings = {key: _checked(path, key, value) for key, value in table.items()}
    for key in ("output", "plan"):
        if key in settings and not is_address(settings[key]):
            settings[key] = os.path.join(path.parent, os.path.expanduser(settings[key]))
    return settings


def read_dry_window(folder: Path) -> DryWindow:
    """Reads ``[tool.memprof.dry_run]``, the fields of ``DryWindow``, from the nearest pyproject.toml.

    Raises:
        UsageError: The file is not TOML, or the table is invalid.
    """
    path = _project_file(folder)
    table = None if path is None else _read(path).get(_DRY_RUN)
    return _dry_window(path, table) if path is not None and isinstance(table, dict) else DryWindow()


def _dry_window(path: Path, table: dict[str, Any]) -> DryWindow:
    where = f"tool.memprof.{_DRY_RUN}"
    values = {key: _checked(path, key, value, _DRY_KEYS, where) for key, value in table.items()}
    return DryWindow(**values, is_chosen="skip" in table or "steps" in table)


def read_gates(folder: Path) -> tuple[Path | None, dict[str, list[str]]]:
    """Reads ``[tool.memprof.gates]``, lists ``fail`` and ``warn`` of gates, from the nearest pyproject.toml.

    Returns:
        The file, None if there is none, and the gates as written.

    Raises:
        UsageError: The file is not TOML, or the table is invalid.
    """
    gates: dict[str, list[str]] = {"fail": [], "warn": []}
    path = _project_file(folder)
    table = {} if path is None else _read(path).get(_GATES, {})
    if not isinstance(table, dict):
        raise UsageError(
            f"{path}: tool.memprof.gates is not a table: write fail = ['peak>+2%'] below [tool.memprof.gates]."
        )
    for level, texts in table.items():
        if level not in gates:
            raise UsageError(f"{path}: [tool.memprof.gates] has no key {level}. The keys are fail and warn.")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{path}: {level} in [tool.memprof.gates] must be a list of strings such as 'peak>+2%'.")
        gates[level] = texts
    return path, gates


def _project_file(folder: Path) -> Path | None:
    return next(
        (one / "pyproject.toml" for one in (folder, *folder.parents) if (one / "pyproject.toml").is_file()), None
    )


def _read(path: Path) -> dict[str, Any]:
    """Returns memprof's table in a pyproject.toml."""
    try:
        text = read_text(path)
        table = parse_toml(text).get("tool", {}).get("memprof", {})
    except OSError:
        # An unreadable file of someone else further up must not prevent recording.
        return {}
    except (BadInputError, ValueError, AttributeError) as error:
        # A broken pyproject.toml without memprof settings is not memprof's concern.
        with path.open("rb") as file:
            if b"tool.memprof" not in file.read(TEXT_LIMIT_BYTES):
                return {}
        why = error if isinstance(error, ValueError) else f"cannot be read: {error}"
        raise UsageError(f"{path} {why}. Correct it, or record from another folder.") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.memprof is not a table. Write [tool.memprof] and its keys below it.")
    return table


def _checked(path: Path, key: str, value: Any, keys: dict[str, type] = _KEYS, where: str = "tool.memprof") -> Any:
    if key not in keys:
        near = difflib.get_close_matches(key, keys, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(keys)}."
        raise UsageError(f"{path}: [{where}] has no key {key}. {advice}")
    kind = keys[key]
    # In Python, bool is a subclass of int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{path}: {key} in [{where}] must be {_KIND[kind]}, not {value!r}.")
    if isinstance(value, int) and value < _LEAST.get(key, 0):
        raise UsageError(f"{path}: {key} in [{where}] must be {_LEAST.get(key, 0)} or more, not {value}.")
    return value
