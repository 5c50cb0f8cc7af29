"""What is around a recorded job: settings, environment, the part that is recorded, the summary after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.launch.outcome.output import address_of, find_part, with_part
from memprof.launch.outcome.verdict import Verdict, describe_missed, describe_nothing, describe_status
from memprof.launch.parent.job_process import recording_environment, stand_in_for_tools
from memprof.launch.parent.settings import DryWindow, Settings, read_dry_window, read_project_settings
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_nearest_file_counts(tmp_path: Path) -> None:
    """The search goes upwards and ends at the first pyproject.toml, also where that one says nothing."""
    write(tmp_path, "[tool.memprof]\nskip = 7\n")
    below = tmp_path / "project" / "scripts"
    below.mkdir(parents=True)
    assert read_project_settings(below) == {"skip": 7}
    write(tmp_path / "project", "[project]\nname = 'x'\n")
    assert read_project_settings(below) == {}


def test_every_key_is_read(tmp_path: Path) -> None:
    """All options can be set; a relative output counts from the file's own folder."""
    write(
        tmp_path,
        "[tool.memprof]\noutput='runs/a.memprof'\nforce=true\nquiet=true\nskip=0\nsteps=1\nstop=true\ndry_run=true\nplan='p.toml'\n",
    )
    assert read_project_settings(tmp_path) == {
        "output": str(tmp_path / "runs/a.memprof"),
        "force": True,
        "quiet": True,
        "skip": 0,
        "steps": 1,
        "stop": True,
        "dry_run": True,
        "plan": str(tmp_path / "p.toml"),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz = 3", "has no key stepz. Did you mean steps?"),
        (
            "colour = 'red'",
            "has no key colour. The keys are output, force, quiet, skip, steps, stop, light, dry_run, whole, device",
        ),
        ("steps = 'three'", "steps in [tool.memprof] must be a whole number, not 'three'"),
        ("steps = true", "steps in [tool.memprof] must be a whole number, not True"),
        ("force = 1", "force in [tool.memprof] must be true or false, not 1"),
        ("output = 3", "output in [tool.memprof] must be a text, not 3"),
        ("steps = 0", "steps in [tool.memprof] must be 1 or more, not 0"),
        ("skip = -1", "skip in [tool.memprof] must be 0 or more, not -1"),
        ("dry_run = 1", "dry_run in [tool.memprof] must be true or false, not 1"),
        ("dry_run = {step = 3}", "[tool.memprof.dry_run] has no key step. Did you mean steps?"),
        ("dry_run = {steps = 0}", "steps in [tool.memprof.dry_run] must be 1 or more, not 0"),
        ("skip = = 1", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    """An unknown key, a wrong type, a value out of range or broken TOML each get a message with the file's path."""
    write(tmp_path, f"[tool.memprof]\n{text}\n")
    with pytest.raises(UsageError) as error:
        read_project_settings(tmp_path)
    assert sentence in str(error.value)
    assert str(tmp_path / "pyproject.toml") in str(error.value)


def test_steps_of_dry_runs_have_a_table_of_their_own(tmp_path: Path) -> None:
    """It chooses their window and makes no run dry; what it leaves out stays as it is without."""
    assert read_dry_window(tmp_path) == DryWindow(skip=1, steps=2)
    write(tmp_path, "[tool.memprof]\nsteps = 9\n[tool.memprof.dry_run]\nskip = 4\nisolate = false\n")
    assert read_dry_window(tmp_path) == DryWindow(skip=4, steps=2, isolate=False, is_chosen=True)
    assert read_project_settings(tmp_path) == {"steps": 9}


def test_not_a_table(tmp_path: Path) -> None:
    """``memprof = 3`` under [tool] is named too."""
    write(tmp_path, "[tool]\nmemprof = 3\n")
    with pytest.raises(UsageError, match="not a table"):
        read_project_settings(tmp_path)


def test_broken_file_of_others_is_passed_over(tmp_path: Path) -> None:
    """A pyproject.toml that is broken and says nothing to memprof does not forbid recording."""
    write(tmp_path, "[project\n")
    assert read_project_settings(tmp_path) == {}
    write(tmp_path, "tool = 3\n")
    assert read_project_settings(tmp_path) == {}
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe")
    assert read_project_settings(tmp_path) == {}


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


TWO_NODES = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8")


@pytest.mark.parametrize(
    ("arguments", "environment", "part"),
    [
        (("python", "train.py"), {}, ""),
        (("torchrun", "--nproc-per-node", "2", "train.py"), {}, ""),
        (("torchrun", "--nnodes=1", "--node-rank=0", "train.py"), {}, ""),
        ((*TWO_NODES, "--node-rank", "1", "train.py"), {}, "node1"),
        (("torchrun", "--nnodes=1:4", "--node_rank=3", "train.py"), {}, "node3"),
        (("torchrun", "train.py"), {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "node1"),
        (("accelerate", "launch", "--num_machines", "2", "--machine_rank", "1", "train.py"), {}, "node1"),
        ((*TWO_NODES, "train.py"), {"SLURM_NODEID": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, "node5"),
        (("python", "train.py"), {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "rank3"),
        (("python", "train.py"), {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ""),
        (("python", "train.py"), {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        (("python", "train.py"), {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "rank2"),
        (("python", "train.py"), {"PMI_RANK": "1", "PMI_SIZE": "2"}, "rank1"),
        (("python", "train.py"), {"RANK": "1", "WORLD_SIZE": "2"}, "rank1"),
    ],
)
def test_part_is_told_by_the_launcher(arguments: tuple[str, ...], environment: dict[str, str], part: str) -> None:
    """A parent for one of several nodes, or for one of several ranks, knows itself as such."""
    assert find_part(arguments, environment) == part


def test_a_node_that_does_not_know_its_number_goes_by_its_name() -> None:
    """With a rendezvous the nodes agree on numbers later; the machine's name keeps their files apart."""
    part = find_part((*TWO_NODES, "--rdzv-backend", "c10d", "train.py"), {})
    assert part.startswith("node-")
    assert "." not in part


@pytest.mark.parametrize(
    ("output", "part", "file"),
    [
        ("run.memprof", "", "run.memprof"),
        ("a/run.memprof", "node1", "a/run.node1.memprof"),
        ("run", "rank0", "run.rank0"),
    ],
)
def test_each_part_has_a_file_of_its_own(output: str, part: str, file: str) -> None:
    """The part stands before the suffix."""
    assert with_part(Path(output), part) == Path(file)


def test_addresses_have_parts_too() -> None:
    """An address keeps its protocol and folder."""
    assert address_of("s3://bucket/job/run.memprof", "node1") == "s3://bucket/job/run.node1.memprof"


def test_status_in_words() -> None:
    """Signals are named, real-time signals numbered, statuses told."""
    assert describe_status(0) == "it ended with status 0"
    assert describe_status(255) == "it ended with status 255"
    assert describe_status(-15) == "it was killed by SIGTERM"
    assert describe_status(-40) == "it was killed by signal 40"


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ((), "ran no Python that loads the recorder"),
        (("python-started",), "never imported torch"),
        (("python-started", "torch-imported"), "never called a model or an optimizer, nor ran backward"),
        (("python-started", "torch-imported", "process-7/"), "no recorder could create a file"),
        (("python-started", "torch-imported", "process-7/", "process-7/rows"), "ended before the first operator"),
    ],
)
def test_how_far_a_job_came(tmp_path: Path, marks: tuple[str, ...], reason: str) -> None:
    """The marks in the spool show how far the job came."""
    for mark in marks:
        if mark.endswith("/"):
            (tmp_path / mark).mkdir()
        else:
            (tmp_path / mark).touch()
    verdict = describe_nothing(tmp_path, "train.py", 1)
    assert verdict.sentence.startswith("nothing was recorded: ")
    assert reason in verdict.sentence
    assert verdict.sentence.endswith("(it ended with status 1).")
    assert verdict.next_command == ""


@pytest.mark.parametrize("log", ["bootstrap-7.log", "recorder-7.log"])
def test_fault_of_the_recorder_is_told(tmp_path: Path, log: str) -> None:
    """The last line of a log is the reason, whatever else is there."""
    (tmp_path / "python-started").touch()
    (tmp_path / log).write_text("Traceback (most recent call last):\n  File\nOSError: no space\n\n")
    assert "the recorder could not start in train.py: OSError: no space" in str(
        describe_nothing(tmp_path, "train.py", 0)
    )


def test_a_job_that_removed_the_recorders_folder(tmp_path: Path) -> None:
    """The reason names the folder, and blames no interpreter."""
    sentence = describe_nothing(tmp_path / "run.memprof.spool", "train.py", 0).sentence
    assert sentence == (
        f"nothing was recorded: {tmp_path}/run.memprof.spool, to which recorders write, was removed while train.py ran "
        "(it ended with status 0)."
    )


def test_verdict_on_the_terminal() -> None:
    """Each line has memprof's name, to distinguish it from the job's own output."""
    assert str(Verdict("a", "memprof report b")) == "memprof: a\nmemprof: next: memprof report b"
    assert str(Verdict("a")) == "memprof: a"


def test_policies_that_met_no_model_are_named() -> None:
    """A plan that was applied in part says which policies were not; one applied whole, or empty, says nothing."""
    plan = Plan((Checkpoint(modules=("a.*",)), Checkpoint(modules=("b.*",))))
    assert describe_missed(plan, {0, 1}) == []
    assert describe_missed(plan, {0}) == ["policies not applied to any model called in training: checkpoint b.*."]
    assert describe_missed(plan, set()) == ["the plan was not applied: no model of the job was called in training."]
    assert describe_missed(Plan(), set()) == []


def test_a_light_run_that_the_jobs_own_profiler_had_throughout(tmp_path: Path) -> None:
    """Its steps were counted; the sentence says that none was recorded in full, and of no warm-up."""
    (tmp_path / "job.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with torch.profiler.profile():\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    words = [sys.executable, "-m", "memprof", "record", "--light", "-o", "run.memprof", "job.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "memprof: followed job.py: of 3 steps, step " in done.stderr
    assert ". No step was recorded in full. run.memprof holds " in done.stderr
