"""The environment of a recorded job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from memprof.launch.parent.job_process import recording_environment, stand_in_for_tools
from memprof.launch.parent.settings import Settings

SPOOL = Path("/somewhere/run.memprof.spool")


def test_job_keeps_its_own_variables() -> None:
    """Everything the job's environment held is there, and the given environment is left as it was."""
    given = {"HOME": "/home/me", "PYTHONPATH": "/mine:/yours", "KINETO_LOG_LEVEL": "2"}
    added = recording_environment(given, SPOOL, Settings(skip=1, steps=4, stop=True))
    assert given == {"HOME": "/home/me", "PYTHONPATH": "/mine:/yours", "KINETO_LOG_LEVEL": "2"}
    assert added["HOME"] == "/home/me"
    assert added["KINETO_LOG_LEVEL"] == "2"
    assert added["PYTHONPATH"].split(os.pathsep)[1:] == ["/mine", "/yours"]
    assert json.loads(added["MEMPROF_SETTINGS"]) == {"skip": 1, "steps": 4, "stop": True}
    assert added["MEMPROF_SPOOL"] == str(SPOOL)
    assert (Path(added["MEMPROF_PACKAGE"]) / "launch" / "child.py").is_file()


def test_no_part_of_the_python_path_is_empty() -> None:
    """An empty part of PYTHONPATH means the current folder, which the job did not ask for."""
    for given in ({}, {"PYTHONPATH": ""}):
        path = recording_environment(given, SPOOL, Settings())["PYTHONPATH"]
        assert path.split(os.pathsep) == [path]
        assert (Path(path) / "sitecustomize.py").is_file()


def test_job_that_asked_for_the_current_folder_keeps_it() -> None:
    """Empty parts that were there stay."""
    path = recording_environment({"PYTHONPATH": ":/mine"}, SPOOL, Settings())["PYTHONPATH"]
    assert path.split(os.pathsep)[1:] == ["", "/mine"]


def test_a_virtual_gpu_has_the_program_that_scripts_log(tmp_path: Path) -> None:
    """Without options it prints a sentence, with options it fails as without a driver; an installed one is left."""
    given = {"PATH": "/bin"}
    path = stand_in_for_tools(given, tmp_path, "rtx4090")["PATH"]
    assert path == f"/bin:{tmp_path}/programs"
    plain = subprocess.run(["nvidia-smi"], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert plain.stdout == "memprof: dry run on a virtual rtx4090, without a driver\n"
    assert subprocess.run(["nvidia-smi", "-L"], env={"PATH": path}, capture_output=True, check=False).returncode == 9
    assert stand_in_for_tools({"PATH": path}, tmp_path, "rtx4090") == {"PATH": path}
    assert stand_in_for_tools(given, tmp_path, "") == given


def test_recording_inside_a_recording_belongs_to_the_inner_one() -> None:
    """The bootstrap stands on the path once, and the spool is the inner one."""
    outer = recording_environment({"PYTHONPATH": "/mine"}, SPOOL, Settings())
    inner = recording_environment(outer, Path("/inner.spool"), Settings())
    assert inner["PYTHONPATH"] == outer["PYTHONPATH"]
    assert inner["MEMPROF_SPOOL"] == "/inner.spool"
    alone = recording_environment({}, SPOOL, Settings())
    assert recording_environment(alone, SPOOL, Settings()) == alone
