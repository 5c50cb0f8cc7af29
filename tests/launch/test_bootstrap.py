"""The bootstrap, in separate processes with stand-ins for torch and memprof of a few lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memprof.launch

BOOTSTRAP = Path(memprof.launch.__file__).parent / "bootstrap"

TORCH = """
import sys
sys.stderr.write("torch begins\\n")
import torch.nn
is_ready = True
sys.stderr.write("torch ends\\n")
"""
CHILD = """
import sys

def install(settings):
    import torch
    sys.stderr.write(f"installed {torch.is_ready} {sorted(settings.items())}\\n")
"""


class Job:
    """A folder with a fake torch, a fake memprof and a spool, in which programs run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.write("site/torch/__init__.py", TORCH)
        self.write("site/torch/nn.py", "")
        self.write("tool/memprof/__init__.py", "")
        self.write("tool/memprof/launch/__init__.py", "")
        self.write("tool/memprof/launch/child.py", CHILD)
        self.write("tool/memprof/recorder/__init__.py", "")
        self.write("tool/memprof/recorder/clock.py", "clock_ns = None")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, program: str, *, with_bootstrap: bool = True, options: tuple[str, ...] = ()) -> tuple[str, str]:
        """Runs a program and returns what it printed on stdout and stderr."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEMPROF_"))}
        site = str(self.folder / "site")
        if with_bootstrap:
            variables |= {
                "MEMPROF_SPOOL": str(self.spool),
                "MEMPROF_SETTINGS": json.dumps({"skip": 4}),
                "MEMPROF_PACKAGE": str(self.folder / "tool" / "memprof"),
            }
            variables["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), site])
        else:
            variables["PYTHONPATH"] = site
        self.write("main.py", program)
        command = [sys.executable, *options, "main.py"]
        ended = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=60)
        return _without_addresses(ended.stdout), _without_addresses(ended.stderr)

    def run_both(self, program: str) -> None:
        """Runs a program with and without the bootstrap and asserts that they behave identically."""
        assert self.run(program) == self.run(program, with_bootstrap=False)

    @property
    def logs(self) -> str:
        return "".join(path.read_text() for path in self.spool.glob("bootstrap-*.log"))


def _without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_recorder_starts_when_torch_is_whole(job: Job) -> None:
    """The recorder starts once, after the last line of torch, with the settings and the spool."""
    _, stderr = job.run("import torch\nimport torch.nn\nimport torch\n")
    settings = [("skip", 4), ("spool", str(job.spool))]
    assert stderr == f"torch begins\ntorch ends\ninstalled True {settings}\n"
    assert {path.name for path in job.spool.iterdir()} == {"python-started", "torch-imported"}


def test_recorder_starts_when_a_part_of_torch_is_imported_first(job: Job) -> None:
    """``import torch.nn`` imports torch too."""
    assert "installed True" in job.run("import torch.nn")[1]


def test_torch_looks_as_it_would(job: Job) -> None:
    """Neither the module, nor its spec, nor the import system keeps a trace of the wait, also during the import."""
    look = (
        "print(type(torch.__spec__).__mro__, torch.__spec__, torch.__loader__ is torch.__spec__.loader)\n"
        "print(torch.__loader__, torch.__spec__._initializing, sorted(vars(torch.__spec__)))\n"
    )
    job.write("tool/memprof/launch/child.py", "def install(settings): pass")
    job.run_both(f"import sys, torch\n{look}print(sys.meta_path, sys.path)")


def test_the_wait_is_unseen(job: Job) -> None:
    """A process that never imports torch has the modules, paths and flags it would have."""
    job.run_both("import sys; print(sorted(sys.modules), sys.path, sys.flags, sorted(sys.path_importer_cache))")


def test_looking_for_torch_does_not_start_the_recorder(job: Job) -> None:
    """Libraries ask whether torch is there without importing it; a later import still counts."""
    program = "import importlib.util, sys\nspec = importlib.util.find_spec('torch')\nsys.stderr.write(repr(spec))\n"
    assert "installed" not in job.run(program)[1]
    assert "installed" in job.run(program + "import torch")[1]
    job.run_both("import importlib.util; print(importlib.util.find_spec('torch'), importlib.util.find_spec('torc'))")


def test_torch_that_fails_shows_its_own_traceback(job: Job) -> None:
    """No frame of the bootstrap stands in a traceback out of the import of torch, whatever the exception."""
    for failure in ("1 / 0", "raise KeyboardInterrupt", "import torch.absent", "raise SystemExit('no torch')"):
        job.write("site/torch/__init__.py", failure)
        job.run_both("import torch")


def test_a_second_try_to_import_torch_counts(job: Job) -> None:
    """Torch may fail once and be imported later; the recorder starts then, once."""
    job.write(
        "site/torch/__init__.py", "import os\nif not os.environ.pop('OK', ''): raise ImportError\nis_ready = True"
    )
    program = "import os\ntry: import torch\nexcept ImportError: os.environ['OK'] = '1'\nimport torch, torch.nn"
    assert job.run(program)[1].count("installed True") == 1


def test_absent_torch_is_absent(job: Job) -> None:
    """Without torch the job gets Python's own error."""
    program = "import sys; sys.path = [path for path in sys.path if 'site-packages' not in path]\nimport torch"
    (job.folder / "site" / "torch").rename(job.folder / "site" / "elsewhere")
    assert "ModuleNotFoundError: No module named 'torch'" in job.run(program)[1]
    job.run_both(program)


def test_torch_imported_by_a_thread(job: Job) -> None:
    """Two threads that import torch at once get one recorder."""
    program = (
        "import threading\n"
        "threads = [threading.Thread(target=lambda: __import__('torch')) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\n"
    )
    assert job.run(program)[1].count("installed True") == 1


def test_forked_child_is_recorded(job: Job) -> None:
    """A process forked before torch is imported waits for torch by itself."""
    program = "import os\nif os.fork() == 0:\n    import torch\n    os._exit(0)\nos.wait()"
    assert job.run(program)[1].count("installed True") == 1


def test_other_sitecustomize_runs(job: Job) -> None:
    """Another sitecustomize runs as it would have, and is the one the job finds."""
    job.write("site/sitecustomize.py", "import sys\nprint('other', __name__, __file__, sys.path[:2])\nkept = 7\n")
    job.run_both("import sys, sitecustomize; print(sitecustomize.kept, sitecustomize.__spec__, sys.modules.keys())")


def test_broken_sitecustomize_fails_as_it_would(job: Job) -> None:
    """An error in another sitecustomize is reported by Python in its own words."""
    for failure in ("raise ValueError('theirs')", "import absent_module", "raise ImportError('theirs')"):
        job.write("site/sitecustomize.py", failure)
        job.run_both("import sys; print('sitecustomize' in sys.modules)")


def test_sitecustomize_that_imports_torch_is_recorded(job: Job) -> None:
    """Torch is seen even where a sitecustomize imports it."""
    job.write("site/sitecustomize.py", "import torch")
    assert "installed True" in job.run("")[1]


def test_fault_of_the_recorder_stays_unseen(job: Job) -> None:
    """An error while the recorder starts goes into the spool's log, and the job runs on."""
    job.write("tool/memprof/launch/child.py", "def install(settings): raise RuntimeError('ours')")
    stdout, stderr = job.run("import torch; print('job goes on', torch.is_ready)")
    assert (stdout, stderr) == ("job goes on True\n", "torch begins\ntorch ends\n")
    assert job.logs.endswith("RuntimeError: ours\n")


def test_exceptions_of_the_jobs_import_hooks_stay_unseen(job: Job) -> None:
    """A finder of the job's that ends the import of any module it does not know does not end the import of torch."""
    for raised in ("KeyboardInterrupt", "SystemExit(3)", "GeneratorExit", "ImportError"):
        stdout, stderr = job.run(
            "import sys\nclass Finder:\n  def find_spec(self, name, path=None, target=None):\n"
            f"    if name.startswith('memprof'): raise {raised}\n"
            "sys.meta_path.insert(0, Finder())\nimport torch; print('job goes on', torch.is_ready)"
        )
        assert (stdout, stderr) == ("job goes on True\n", "torch begins\ntorch ends\n"), raised


@pytest.mark.parametrize("handler", ["signal.default_int_handler", "handle"])
def test_an_interrupt_while_the_recorder_starts_is_the_jobs(job: Job, handler: str) -> None:
    """Ctrl-C raises KeyboardInterrupt in the job, whether Python's handler or one of the job's raises it."""
    job.write(
        "tool/memprof/launch/child.py",
        "import os, signal\ndef install(settings):\n  os.kill(os.getpid(), signal.SIGINT)\n  for _ in range(9): pass",
    )
    stdout, _ = job.run(
        f"import signal\ndef handle(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGINT, {handler})\n"
        "try: import torch\nexcept KeyboardInterrupt: print('interrupted')"
    )
    assert stdout == "interrupted\n"


def test_job_with_a_memprof_of_its_own_keeps_it(job: Job) -> None:
    """A module called memprof in the job is not replaced; the recording is given up and the log says why."""
    job.write("memprof.py", "mine = True")
    stdout, stderr = job.run("import torch, memprof; print(memprof.mine)")
    assert stdout == "True\n"
    assert "installed" not in stderr
    assert "module of its own called memprof" in job.logs
    stdout, _ = job.run("import memprof, torch; print(memprof.mine)")
    assert stdout == "True\n"


def test_folder_called_memprof_is_not_in_the_way(job: Job) -> None:
    """A folder called memprof next to the script, of recordings or a clone, is not taken for a module."""
    job.write("memprof/notes.txt", "")
    assert "installed True" in job.run("import torch")[1]


def test_memprof_is_the_one_that_records(job: Job) -> None:
    """The job imports the code that the parent runs, by path, though sys.path does not lead to it."""
    stdout, _ = job.run("import torch, memprof, sys; print(memprof.__file__); print('tool' in ''.join(sys.path))")
    assert stdout == f"{job.folder}/tool/memprof/__init__.py\nFalse\n"


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_isolated_python_is_left_alone(job: Job, option: str) -> None:
    """Python that ignores its environment or its site is not recorded, and marks nothing."""
    job.run("print(1)", options=(option,))
    assert not list(job.spool.iterdir())


def test_without_a_spool_nothing_happens(job: Job) -> None:
    """A process that outlives the recording, or inherited only PYTHONPATH, is left alone."""
    job.spool.rmdir()
    stdout, stderr = job.run("import torch, sys; print(len(sys.meta_path))")
    assert "installed" not in stderr
    assert (stdout, stderr) == job.run("import torch, sys; print(len(sys.meta_path))", with_bootstrap=False)
