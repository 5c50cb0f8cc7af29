"""``memprof record`` from end to end: refusals, files and messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from memprof.launch.outcome.verdict import Verdict
from memprof.launch.parent.recorded_job import _kept
from memprof.launch.parent.target import Target
from memprof.launch.torch_versions import NEWEST
from memprof.trace.schema import HostMemory, Steps
from memprof.trace.store import Trace

TRAINING = """
import os, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(int(os.environ.get("STEPS", "8"))):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    print(step, flush=True)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "hello.py").write_text("import sys\nprint(sys.argv[1:])\nopen('ran', 'w')\n")
    return tmp_path


def record(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", "record", *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def left(folder: Path) -> set[str]:
    """Names what memprof left in the folder."""
    return {path.name for path in folder.iterdir()} - {"train.py", "hello.py", "ran", "pyproject.toml"}


@pytest.mark.cold
def test_training_leaves_one_file_and_a_sentence(folder: Path) -> None:
    """The recording is packed into one file; stderr names its content and the next command, stdout is the job's.

    The manifest contains the job and the time of the recording.
    """
    before = time.time() * 1e6
    ended = record("-o", "run.memprof", "train.py", STATUS="3")
    assert ended.returncode == 3
    assert ended.stdout == "".join(f"{step}\n" for step in range(8))
    sentence, following = ended.stderr.splitlines()
    assert sentence.startswith("memprof: recorded 3 steps of train.py: peak ")
    assert "run.memprof" in sentence
    assert following == "memprof: next: memprof report run.memprof"
    assert left(folder) == {"run.memprof"}
    trace = Trace.open("run.memprof")
    assert trace.recorded_steps == (2, 3, 4)
    assert trace.manifest.command[1:] == ("train.py",)
    assert trace.manifest.target == "train.py"
    assert before < trace.manifest.created_us < time.time() * 1e6
    assert trace.manifest.capture.exit_status == 3
    host = trace.table(HostMemory)
    assert set(host.role) == {"trainer", "child"} or set(host.role) == {"trainer"}
    for pid in set(host.pid):  # the last line about a process may say that it has ended
        assert host.rss_bytes[host.pid == pid][:-1].min(initial=1) > 0
    assert host.rss_bytes.max() > 0


def test_options_choose_the_window(folder: Path) -> None:
    """Flags win over MEMPROF_*, which win over pyproject.toml, which wins over the defaults."""
    (folder / "pyproject.toml").write_text("[tool.memprof]\nsteps = 4\nskip = 3\nquiet = true\noutput = 'p.memprof'\n")
    ended = record("--steps", "1", "train.py", MEMPROF_STEPS="2", MEMPROF_SKIP="1")
    assert ended.stderr == ""
    assert Trace.open("p.memprof").recorded_steps == (1,)


def test_stop_ends_the_job_after_the_window() -> None:
    """With --stop the job ends by itself once the steps are recorded, with status 0."""
    ended = record("-o", "run.memprof", "--stop", "--skip", "0", "--steps", "1", "train.py", STEPS="100000")
    assert ended.returncode == 0
    assert Trace.open("run.memprof").recorded_steps == (0,)


def test_job_shorter_than_the_skip_keeps_its_warm_up() -> None:
    """A job that ends before its window is not lost: the sentence says what there is."""
    ended = record("-o", "run.memprof", "train.py", STEPS="1")
    assert ended.returncode == 0
    assert "recorded only the warm-up of train.py" in ended.stderr
    assert set(Trace.open("run.memprof").table(Steps).kind) == {"warm_up"}


@pytest.mark.cold
@pytest.mark.parametrize(
    ("program", "reason", "status"),
    [
        ("", "hello.py never imported torch (it ended with status 0)", 3),
        ("import absent_module", "hello.py never imported torch (it ended with status 1)", 1),
        ("import torch; torch.ones(3) + 1", "hello.py imported torch, but never called a model or an optimizer", 3),
        (
            "import torch; torch.optim.SGD([torch.ones(3)]); raise SystemExit(7)",
            "hello.py imported torch, but never",
            7,
        ),
        ("import os; os.kill(os.getpid(), 9)", "hello.py never imported torch (it was killed by SIGKILL)", -9),
    ],
)
def test_nothing_recorded_leaves_nothing(folder: Path, program: str, reason: str, status: int) -> None:
    """Where nothing was recorded no file is left, the sentence says why, and only a status of 0 is replaced."""
    (folder / "hello.py").write_text(program)
    ended = record("-o", "run.memprof", "hello.py")
    assert ended.stderr.splitlines()[-1].startswith(f"memprof: nothing was recorded: {reason}")
    assert ended.returncode == status
    assert left(folder) == set()


def test_a_job_that_never_trains_its_model_is_told_so_and_dry_run(folder: Path) -> None:
    """With an optimizer, a recording waits for training; a dry run records from the first call on."""
    (folder / "infers.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with torch.no_grad():\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(32, 64))\n"
    )
    ended = record("-o", "run.memprof", "infers.py")
    assert ended.stderr.startswith("memprof: nothing was recorded: infers.py called its models without gradients only")
    assert ended.returncode == 3
    ended = record("--dry-run", "-o", "run.memprof", "infers.py")
    assert ended.returncode == 0, ended.stderr
    assert Trace.open("run.memprof").step_peaks()[0] >= 4 * (64 * 64 + 64 + 2 * 32 * 64)


@pytest.mark.cold
@pytest.mark.parametrize("mode", [("--quiet",), ("--light",), ("--dry-run",), ("--dry-run", "--device", "rtx4090")])
def test_nothing_recorded_is_said_first_in_every_mode(mode: tuple[str, ...]) -> None:
    """It is the first line that memprof prints, and the status is not 0."""
    ended = record("-o", "run.memprof", *mode, "hello.py")
    assert ended.stderr.startswith("memprof: nothing was recorded: hello.py never imported torch")
    assert ended.returncode == 3


def test_a_job_that_stays_off_the_virtual_gpu_is_not_recorded_there(folder: Path) -> None:
    """A dry run on a device, of a model on the processor: the first line says so, and the status is not 0."""
    ended = record("-o", "run.memprof", "--dry-run", "--device", "rtx4090", "train.py")
    assert ended.stderr.startswith(
        "memprof: nothing was recorded on the virtual GPU: the job allocated nothing on the virtual device (RTX 4090)"
    )
    assert ended.returncode == 3
    assert record("-f", "-o", "run.memprof", "--dry-run", "train.py").returncode == 0


@pytest.mark.cold
def test_nothing_recorded_leaves_no_older_file(folder: Path) -> None:
    """With -f an older recording does not stay and pass for the new one."""
    (folder / "run.memprof").write_text("older")
    assert record("-f", "-o", "run.memprof", "hello.py").returncode == 3
    assert left(folder) == set()


@pytest.mark.cold
def test_isolated_python_is_explained() -> None:
    """python -I cannot be recorded, and the message says so."""
    ended = record("--", sys.executable, "-I", "hello.py", "x")
    assert ended.returncode == 3
    assert ended.stdout == "['x']\n"
    assert "python -I, -E and -S disable it" in ended.stderr


@pytest.mark.cold
def test_fault_of_the_recorder_is_explained(folder: Path) -> None:
    """Where the recorder could not start, the reason is in the sentence."""
    (folder / "memprof.py").write_text("mine = True")
    (folder / "hello.py").write_text("import torch")
    ended = record("hello.py")
    assert ended.returncode == 3
    assert "the recorder could not start in hello.py: ImportError: the job has a module of its own" in ended.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ((), 2),
        (("--steps", "0", "hello.py"), 2),
        (("--step", "1", "hello.py"), 2),
        (("absent.py",), 127),
        (("--", "no-such-command"), 127),
        (("--", "./hello.py"), 126),
        (("-o", "absent/run.memprof", "hello.py"), 125),
        (("-o", "train.py", "hello.py"), 125),
        (("-o", "/proc/run.memprof", "hello.py"), 125),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(folder: Path, words: tuple[str, ...], status: int) -> None:
    """One message on stderr, the right exit code, no job and no files left."""
    ended = record(*words)
    assert ended.returncode == status
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert not (folder / "ran").exists()
    assert left(folder) == set()


@pytest.mark.cold
def test_program_without_its_interpreter(folder: Path) -> None:
    """A script whose first line names a missing interpreter is found out by the system alone: 127, nothing left."""
    (folder / "hello.py").write_text("#!/no/such/interpreter\n")
    (folder / "hello.py").chmod(0o755)
    ended = record("--", "./hello.py")
    assert (ended.returncode, ended.stdout) == (127, "")
    assert "its interpreter is missing" in ended.stderr
    (folder / "hello.py").write_bytes(b"\x7fELF no program")
    assert record("--", "./hello.py").returncode == 126
    assert left(folder) == set()


def test_mistake_in_pyproject_is_a_usage_error(folder: Path) -> None:
    """A misspelt key is named before anything runs."""
    (folder / "pyproject.toml").write_text("[tool.memprof]\nstepz = 4\n")
    ended = record("hello.py")
    assert ended.returncode == 2
    assert "Did you mean steps?" in ended.stderr
    assert not (folder / "ran").exists()


def test_mistake_in_the_environment_is_a_usage_error(folder: Path) -> None:
    """So is a variable that does not fit."""
    ended = record("hello.py", MEMPROF_STEPS="many")
    assert ended.returncode == 2
    assert "'many'" in ended.stderr
    assert not (folder / "ran").exists()


@pytest.mark.cold
def test_job_gets_its_words_verbatim() -> None:
    """Whatever follows the script is the job's, options of memprof's and dashes included."""
    words = ["-o", "--steps", "--", "-h", "-m", "", "a b"]
    assert record("-q", "hello.py", *words).stdout == f"{words}\n"
    assert record("-q", "-m", "hello", *words).stdout == f"{words}\n"
    assert record("-q", "--", sys.executable, "hello.py", *words).stdout == f"{words}\n"


def test_parent_killed_leaves_a_spool_that_opens(folder: Path) -> None:
    """When memprof is killed the job trains on, and its spool opens like a trace."""
    (folder / "train.py").write_text(TRAINING + "open('ended', 'w')")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "memprof.cli.main", "record", "-o", "run.memprof", "train.py"],
        stdout=subprocess.PIPE,
        env=os.environ | {"STEPS": "200"},
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"1\n":
            pass
        process.kill()
        assert process.stdout.read().endswith(b"199\n")
    assert Trace.open("run.memprof.spool").recorded_steps == (2, 3, 4)
    launch = json.loads(Path("run.memprof.spool/launch.json").read_text())
    assert launch["options"] == {"skip": 2, "steps": 3, "stop": False, "light": False}


def test_killed_job_keeps_what_was_recorded(folder: Path) -> None:
    """SIGKILL to the job leaves a trace that says where it ends, and memprof ends the same way."""
    (folder / "train.py").write_text(
        TRAINING.replace("print(step", "step == 3 and os.kill(os.getpid(), 9); print(step")
    )
    ended = record("-o", "run.memprof", "train.py")
    assert ended.returncode == -signal.SIGKILL
    assert "It ends early" in ended.stderr
    trace = Trace.open("run.memprof")
    assert trace.recorded_steps[0] == 2
    capture = trace.manifest.capture
    assert not capture.is_complete
    assert capture.exit_status == -signal.SIGKILL


@pytest.mark.slow
def test_ranks_of_one_job_are_in_one_file(folder: Path) -> None:
    """Processes that train side by side, as torchrun starts them, are packed together."""
    launcher = (
        "import os, subprocess, sys\n"
        "def start(rank):\n"
        "    variables = {'RANK': str(rank), 'WORLD_SIZE': '2'}\n"
        "    return subprocess.Popen([sys.executable, 'train.py'], env=os.environ | variables)\n"
        "jobs = [start(rank) for rank in range(2)]\n"
        "sys.exit(max(job.wait() for job in jobs))\n"
    )
    (folder / "launch.py").write_text(launcher)
    ended = record("-o", "run.memprof", "launch.py")
    assert ended.returncode == 0
    assert "in 2 processes" in ended.stderr
    assert Trace.open("run.memprof").ranks == (0, 1)


def test_packing_that_fails_keeps_status_and_spool(folder: Path) -> None:
    """When the file cannot be written in the end, the job's status stands and the recording stays readable.

    A spool is called safe only if it can be read; otherwise memprof ends with 3, as nothing was recorded.
    """
    (folder / "train.py").write_text(TRAINING.replace("sys.exit", "os.mkdir('run.memprof'); sys.exit"))
    ended = record("-o", "run.memprof", "train.py", STATUS="4")
    assert ended.returncode == 4
    assert "run.memprof.spool" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert Trace.open("run.memprof.spool").recorded_steps == (2, 3, 4)

    spool, target = folder / "run.memprof.spool", Target(("train.py",), "train.py")

    def kept() -> Verdict:
        return _kept(spool, folder / "none.memprof", target, 0, "the recording could not be packed (a fault). ")

    assert kept().sentence == f"the recording could not be packed (a fault). It is safe in {spool}."
    assert not kept().is_empty
    (spool / "exit.json").write_text("[]")
    assert f"exit.json is damaged: it is not a JSON object.); its raw rows stay in {spool}." in kept().sentence
    assert kept().is_empty
    (spool / "exit.json").unlink()
    for process in spool.glob("process-*/"):
        shutil.rmtree(process)
    assert kept().sentence.startswith("nothing was recorded: ")
    assert not spool.exists()


@pytest.mark.cold
def test_parent_stays_small_while_the_job_runs(folder: Path) -> None:
    """Until the job has ended memprof holds no pandas, no numpy and no torch."""
    look = "import os\nmaps = open(f'/proc/{os.getppid()}/maps').read()\n"
    (folder / "hello.py").write_text(look + "print('pandas' in maps, 'numpy' in maps, 'libtorch' in maps)")
    assert record("hello.py").stdout == "False False False\n"


_NEWER = """
import importlib.util, os, subprocess, sys

class Newer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, "newest.py") if name == "torch.version" else None

sys.meta_path.insert(0, Newer)  # before torch reads its own version
import torch
assert torch.__version__ == "99.1.0"
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"], check=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.cold
def test_a_torch_newer_than_any_tried_is_warned_of_once(folder: Path) -> None:
    """One sentence for all processes of a job, after what was recorded."""
    (folder / "newer.py").write_text(_NEWER)
    version = Path(torch.__file__).with_name("version.py").read_text()
    (folder / "newest.py").write_text(version + '\n__version__ = "99.1.0"\n')
    ended = record("-o", "run.memprof", "newer.py")
    assert ended.returncode == 0, ended.stderr
    warning = f"memprof: warning: torch 99.1.0 is newer than {NEWEST}, the newest that memprof was tried with."
    assert ended.stderr.splitlines().count(warning) == 1
    assert "is newer than" not in ended.stdout
    assert ended.stderr.startswith("memprof: recorded 3 steps of newer.py")


def test_the_torch_it_was_tried_with_is_not_warned_of(folder: Path) -> None:
    """The version that the tests run on is one that memprof was tried with."""
    ended = record("-o", "run.memprof", "train.py")
    assert "recorded 3 steps of train.py" in ended.stderr
    assert "is newer than" not in ended.stderr
