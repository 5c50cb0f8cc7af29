"""Installs the wheel into an empty environment and types there what the pages say, and writes down what happens.

    python -m tests.docs.fresh_machine

replaces the transcript beside this file. Needs a package index, and takes some minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from docs.building.commands import ROOT
from docs.building.workshop import Outcome, run

TRANSCRIPT = Path(__file__).with_name("fresh_machine.txt")
#: What pages ask to be installed for their parts, besides torch.
EXTRAS = "[dashboard,mcp]"
OTHERS = ("tensorboard", "pillow", "ipykernel", "nbclient")
#: They need other versions of some packages than the rest of the development environment.
TRACKERS = ("wandb", "mlflow-skinny", "trackio")

_AGENT = """\
import asyncio
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

async def main():
    async with Client(stdio_client(StdioServerParameters(command="memprof", args=["mcp"]))) as client:
        print(len((await client.list_tools()).tools), "tools")
        calls = {"dry_run": {"command": ["train.py", "--epochs", "1"]}, "report": {"recording": "run.memprof"}}
        for tool, words in calls.items():
            answer = await client.call_tool(tool, words)
            assert not answer.is_error, answer.content[0].text
            print(tool, "answered in at most 4096 bytes:", len(answer.content[0].text.encode()) <= 4096)

asyncio.run(main())
"""
_NOTEBOOK = """\
import nbformat
from nbclient import NotebookClient

train = "import runpy, sys\\nsys.argv = ['train.py', '--epochs', '1']\\nrunpy.run_path('train.py', run_name='__main__')"
cells = ["%load_ext memprof", "%%memprof --steps 3\\n" + train]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=120).execute()
shown = [kind for output in notebook.cells[1].outputs for kind in output.get("data", {})]
print("drawn:", "image/svg+xml" in shown)
"""
_TRACKERS = """\
import os
from pathlib import Path

os.environ.update(MLFLOW_TRACKING_URI=Path("mlruns").absolute().as_uri(), MLFLOW_ALLOW_FILE_STORE="true",
                  TRACKIO_DIR="trackio", WANDB_SILENT="true")
import mlflow
import trackio
import wandb
from torch.utils.tensorboard import SummaryWriter

from memprof.integrations import log, summary

figures = summary("run.memprof")
with SummaryWriter("logs") as writer:
    log("run.memprof", writer)  # the figures, and a picture of the timeline
print("tensorboard:", len(list(Path("logs").iterdir())), "file")
with wandb.init(project="memprof", mode="offline", dir=".") as run:
    log("run.memprof", run)
    print("wandb:", all(run.summary.get(name) == value for name, value in figures.items()))
with mlflow.start_run() as run:
    log("run.memprof", mlflow)
print("mlflow:", mlflow.get_run(run.info.run_id).data.metrics == figures)
log("run.memprof", trackio.init(project="memprof", name="one", embed=False))
trackio.finish()
print("trackio:", len(list(Path("trackio").glob("memprof*.db"))), "database")
"""
_FILES = {"agent.py": _AGENT, "notebook.py": _NOTEBOOK, "trackers.py": _TRACKERS}


@dataclass(frozen=True)
class Typed:
    """A command, and the page that says to type it; "" where none has it word for word."""

    command: str
    page: str = ""


SESSION = (
    Typed("memprof doctor", "docs/doctor.md"),
    Typed("memprof record -o run.memprof train.py", "docs/leaks.md"),
    Typed("memprof report run.memprof", "docs/index.md"),
    Typed("memprof report run.memprof --leaks", "docs/leaks.md"),
    Typed("memprof suggest run.memprof --budget 60% --write plan.toml", "README.md"),
    Typed("memprof history --bisect v1.0..HEAD -- train.py --epochs 1", "docs/history.md"),
    Typed("memprof history --commits HEAD~3..HEAD train.py --epochs 1"),
    Typed("memprof history --add run.memprof"),
    Typed("git checkout main && memprof record --stop -f -o base.memprof train.py", "docs/ci.md"),
    Typed("git checkout - && memprof record --stop -f -o head.memprof train.py", "docs/ci.md"),
    Typed(
        "memprof diff base.memprof head.memprof --format markdown -o comment.md --fail-on 'peak>+2%&+64MiB'",
        "docs/ci.md",
    ),
    Typed("memprof diff run.memprof --fail-on 'growth>0'", "docs/leaks.md"),
    Typed("memprof schema", "docs/agents.md"),
    Typed("memprof schema report", "docs/agents.md"),
    Typed("python agent.py"),
    Typed("python first.py"),
    Typed("python second.py"),
    Typed("python notebook.py"),
    Typed("python trackers.py"),
    Typed("memprof report run.memprof --html memory.html"),
)


def install(folder: Path) -> Path:
    """Builds the wheel, and installs it with torch into a new environment in a folder; returns its ``bin``."""
    pip, pinned = [*shlex.split(os.environ.get("PIP_ARGS", "")), "-q"], ["-c", str(ROOT / "constraints.txt")]
    _checked(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    _checked(sys.executable, "-m", "venv", str(folder / "venv"))
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    # torch alone first: an index may have several builds.
    for wanted in ([*pinned, "torch"], [*pinned, f"{wheel}{EXTRAS}", *OTHERS], TRACKERS):
        _checked(str(programs / "python"), "-m", "pip", "install", *pip, *wanted)
    return programs


def furnish(folder: Path) -> None:
    """Makes a repository of four commits with the job of the documentation; the third doubles its batch."""
    folder.mkdir()
    job = (ROOT / "docs" / "building" / "job.py").read_text(encoding="utf-8")
    batch = re.search(r'"--batch-size".*?default=(\d+)', job)
    assert batch is not None
    wider = job.replace(batch[0], batch[0].replace(f"default={batch[1]}", f"default={2 * int(batch[1])}"))
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    for name, text in {**_FILES, "first.py": first, "second.py": second}.items():
        (folder / name).write_text(text, encoding="utf-8")
    git = ("git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@example.org")
    _checked("git", "init", "-q", "-b", "main", str(folder))
    for number, text in enumerate((job, job + "# notes\n", wider, wider + "# notes\n")):
        (folder / "train.py").write_text(text, encoding="utf-8")
        (folder / ".gitignore").write_text("*\n!train.py\n!pyproject.toml\n", encoding="utf-8")
        (folder / "pyproject.toml").write_text("[tool.memprof.dry_run]\nisolate = false\n", encoding="utf-8")
        _checked(*git, "add", "train.py", "pyproject.toml")
        _checked(*git, "commit", "-q", "-m", f"change {number}")
        if not number:
            _checked(*git, "tag", "v1.0")
    _checked(*git, "checkout", "-q", "-b", "mine")


def transcribe(programs: Path, folder: Path) -> list[tuple[Typed, Outcome]]:
    """Types the session in a folder, with an environment's programs first."""
    variables = {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), "PYTHONPATH": ""}
    return [(typed, run(["bash", "-c", typed.command], folder, variables)) for typed in SESSION]


def written(done: list[tuple[Typed, Outcome]], programs: Path, folder: Path) -> str:
    """Returns the transcript: every command with what it printed and its exit status, without times and paths."""
    parts = []
    for typed, outcome in done:
        said = masked((outcome.output + outcome.errors).rstrip(), programs, folder)
        lines = said.splitlines()
        shown = lines if len(lines) <= 40 else [*lines[:40], f"... ({len(lines) - 40} lines more)"]
        place = f"  # {typed.page}" if typed.page else ""
        parts.append("\n".join([f"$ {typed.command}{place}", *shown, f"[exit status {outcome.status}]", ""]))
    return "\n".join(parts)


def masked(text: str, programs: Path, folder: Path) -> str:
    """Leaves out what differs from run to run: places, commits, and the days of commits."""
    text = text.replace(str(folder), "FOLDER").replace(str(programs), "PROGRAMS").replace(str(ROOT), "CHECKOUT")
    text = re.sub(r"\b[0-9a-f]{7,40}\b(?=[^.])", "HASH", text)
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _checked(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Replaces the transcript."""
    with tempfile.TemporaryDirectory(prefix="memprof-fresh-") as scratch:
        folder = Path(scratch)
        given = os.environ.get("MEMPROF_FRESH")  # an environment made before
        programs = Path(given) if given else install(folder)
        furnish(folder / "work")
        done = transcribe(programs, folder / "work")
        TRANSCRIPT.write_text(written(done, programs, folder / "work"), encoding="utf-8")


if __name__ == "__main__":
    main()
