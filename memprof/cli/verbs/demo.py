"""`memprof demo`: records a small job that ships with memprof, and makes it fit in half of its memory."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import click

from memprof.errors import UsageError


@click.command(
    epilog="""\b
Examples:
  memprof demo
  memprof demo -o first-steps
  memprof demo --budget 40% -o smaller"""
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default="memprof-demo",
    show_default=True,
    metavar="FOLDER",
    help="Folder to make, for the script and what is recorded.",
)
@click.option("--budget", default="50%", show_default=True, metavar="SIZE", help="The budget to make it fit.")
def demo(folder: Path, budget: str) -> int:
    """Record a small GPT that ships with memprof, and make it fit in half of its memory.

    It is trained on the CPU. Every command is printed before it runs, and can be typed for a job of yours. No file is
    replaced, and nothing is written outside the folder.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already, and nothing was changed: choose another folder with -o.")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("no torch in this Python, which the demo trains with: pip install 'torch-memprof[torch]'")
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()  # settings of a project around it are for other jobs
    (folder / "train.py").write_bytes(files("memprof.launch").joinpath("demo_job.py").read_bytes())
    search = f"suggest run.memprof --budget {shlex.quote(budget)}"
    commands = (
        ("Record a training job, unchanged.", "record -o run.memprof train.py"),
        ("Where does its memory go?", "report run.memprof --top 5"),
        (f"Which layers to recompute, to fit in {budget}?", f"{search} --allow checkpoint --write plan.toml"),
        ("Train under that plan.", "record --plan plan.toml -o fits.memprof train.py"),
        ("Was the prediction right?", "verify plan.toml run.memprof fits.memprof"),
    )
    from memprof.cli.page import Page

    own = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    for number, (what, words) in enumerate(commands, start=1):
        page = Page.for_stdout()
        for line in ("", f"{number}. {what}", f"$ memprof {words}", ""):
            page.say(line, "bold")
        page.write()
        sys.stdout.flush()  # before what the command prints
        done = subprocess.run([sys.executable, "-m", "memprof", *shlex.split(words)], cwd=folder, env=own, check=False)
        if done.returncode:
            return done.returncode
        if " --write plan.toml" in words and not (folder / "plan.toml").exists():
            return 0  # it fits as it is, as that command said
    page, place = Page.for_stdout(), shlex.quote(str(folder))
    page.say("")
    page.say(f"The script, both recordings and the plan are in {folder}.", "bold")
    page.add_next(
        (f"memprof dashboard {place}/run.memprof {place}/fits.memprof", "compare both in a browser"),
        (f"memprof suggest {place}/run.memprof --budget {shlex.quote(budget)}", "search with every technique"),
        ("memprof record path/to/train.py", "your own job"),
    )
    page.write()
    return 0
