"""Checks everything that determines whether, and how completely, a job can be recorded here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from memprof.launch.doctor.findings import FAIL, FIX, NOTE, OK, Examination, Finding, Section
from memprof.launch.doctor.libraries import check_libraries
from memprof.launch.doctor.places import check_host, check_output, check_shared_memory
from memprof.launch.doctor.self_test import check_recording
from memprof.launch.doctor.surroundings import check_settings, check_variables, output_folder
from memprof.launch.doctor.torch_check import check_torch
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
