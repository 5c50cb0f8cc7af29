"""A scratch folder in which the commands of the documentation are run; the files they read are made as needed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from docs.building.commands import ROOT

#: How to make a file that commands read, by its name: a command of memprof's, or of Python's.
RECIPES = {
    "run.memprof": "memprof record --stop -o run.memprof train.py",
    "train.1.memprof": "memprof record --stop -o train.1.memprof train.py",
    "head.memprof": "memprof record --stop --checkpoint layers.* -o head.memprof train.py",
    "small.memprof": "memprof record --stop -o small.memprof train.py --batch-size 4",
    "batch8.memprof": "memprof record --stop -o batch8.memprof train.py --batch-size 8",
    "batch16.memprof": "memprof record --stop -o batch16.memprof train.py --batch-size 16",
    "length256.memprof": "memprof record --stop -o length256.memprof train.py --length 64",
    "length512.memprof": "memprof record --stop -o length512.memprof train.py --length 128",
    "mixed.memprof": "memprof record --stop --steps 4 -o mixed.memprof train.py --mixed",
    "compiled.memprof": "memprof record --stop --compile .@0.5 -o compiled.memprof train.py",
    "big.memprof": "memprof record --dry-run --device rtx4090 -o big.memprof sample_traces/gpt/train.py",
    "fits.memprof": (
        "memprof record --dry-run --device rtx4090 --checkpoint layers.* -o fits.memprof sample_traces/gpt/train.py"
    ),
    "sharded.memprof": "memprof record --stop --shard fsdp --world-size 2 -o sharded.memprof train.py",
    "plan.toml": "memprof predict run.memprof --checkpoint layers.* --write plan.toml",
    "base.json": "memprof export run.memprof --to summary -o base.json",
    "memory.json": "memprof export run.memprof --to summary -o memory.json",
    "snapshot.pickle": "memprof export run.memprof --to snapshot -o snapshot.pickle",
    "gpu.pickle": (
        "memprof record --dry-run --device a100-80g -o gpu.memprof train.py --batch-size 8 --snapshot gpu.pickle"
    ),
    "dry-run.pickle": (
        "memprof record --dry-run --device a100-80g -o dry.memprof train.py --batch-size 8 --snapshot dry-run.pickle"
    ),
    "snapshot.memprof": "memprof import gpu.pickle -o snapshot.memprof",
    "stages.memprof": "memprof record --dry-run --device rtx4090 --ranks 4 -o stages.memprof stages.py 1f1b",
    "leak.memprof": "memprof record --steps 8 -o leak.memprof lab/pictures/leaking_job.py",
    "unet.memprof": "memprof record -o unet.memprof lab/zoo/unet.py",
    "experts.memprof": "memprof record -o experts.memprof lab/zoo/mixture_of_experts.py",
    "agent.memprof": "memprof record -o agent.memprof lab/zoo/actor_critic.py",
    "denoiser.memprof": "memprof record --dry-run -o denoiser.memprof lab/benchmarks/jobs/compiled.py diffusion",
    "lora.memprof": "memprof record --dry-run --device rtx4090 -o lora.memprof lab/pictures/lora_job.py",
    "detector.memprof": "memprof record --dry-run --device rtx4090 -o detector.memprof lab/pictures/detector_job.py",
    "vit.memprof": "memprof record -o vit.memprof tests/policies/jobs/vit.py",
    "trace.json.gz": "python profiled.py",
}

#: Names under which pages speak of the same file.
SAME_AS = {
    "base.memprof": "run.memprof",
    "before.memprof": "run.memprof",
    "after.memprof": "head.memprof",
    "main.memprof": "run.memprof",
    "baseline.memprof": "run.memprof",
    "train.*.memprof": "train.1.memprof",
    "eight.memprof": "stages.memprof",
    "oom.memprof": "big.memprof",
}

_PROFILED = """\
import runpy
from torch.profiler import ProfilerActivity, profile

with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
    runpy.run_path("train.py", run_name="__main__")
profiler.export_chrome_trace("trace.json.gz")
"""

#: Options whose value a command writes.
_WRITES = ("-o", "--output", "--write", "--html", "--snapshot")
#: A command that takes longer is taken for one that hangs, in seconds.
PATIENCE_S = 280


@dataclass(frozen=True)
class Outcome:
    """What a command came to: its exit status, and what it printed on stdout and on stderr."""

    status: int
    output: str
    errors: str


class Workshop:
    """A folder with a training job, and what was recorded of it.

    Args:
        folder: An empty folder, for what is made once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = folder / "made"
        self._made.mkdir()
        self._benches = 0
        _furnish(self._made)

    def made(self, name: str) -> Path:
        """Returns a file of RECIPES or SAME_AS, made at the first time.

        Raises:
            RuntimeError: Its recipe failed; the message has what it said.
        """
        name = SAME_AS.get(name, name)
        path = self._made / name
        if not path.exists():
            words = shlex.split(RECIPES[name])
            for read in reads(words):
                self.made(read)
            outcome = run(words, self._made)
            if outcome.status or not path.exists():
                raise RuntimeError(f"{RECIPES[name]} ended with {outcome.status}: {outcome.output}{outcome.errors}")
        return path

    def bench(self, commands: Sequence[Sequence[str]]) -> Path:
        """Returns a new folder in which commands can be run one after the other.

        Args:
            commands: The words of each. What one reads and none before it writes is there.
        """
        self._benches += 1
        bench = self.folder / f"bench{self._benches}"
        bench.mkdir()
        _furnish(bench)
        written: set[str] = set()
        for words in commands:
            for name in reads(words):
                if name not in written:
                    made = self.made(name)
                    shutil.copy(made, bench / made.name if "*" in name else bench / name)
                    if name == "plan.toml" and any(word.startswith("sample_traces/") for word in words):
                        _forget_prediction(bench / name)
            written |= set(writes(words))
        return bench


def reads(words: Sequence[str]) -> list[str]:
    """Returns the files of RECIPES and SAME_AS that a command reads."""
    out = writes(words)
    return [word for word in words if (word in RECIPES or word in SAME_AS) and word not in out]


def writes(words: Sequence[str]) -> list[str]:
    """Returns what stands behind the options that name a file to write."""
    return [word for option, word in pairwise(words) if option in _WRITES]


def run(words: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> Outcome:
    """Runs a command of this environment's.

    Args:
        words: The command, ``memprof`` or another program of the environment first.
        folder: Where.
        variables: More variables of its environment.
    """
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(folder) | (variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def environment(home: Path) -> dict[str, str]:
    """Returns the environment of commands: this Python's programs first, no settings of memprof's, their own home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMPROF_", "PYTEST_"))}
    here = str(Path(sys.executable).parent)
    return kept | {
        "PATH": os.pathsep.join([here, kept.get("PATH", os.defpath)]),
        "HOME": str(home),
        "COLUMNS": "160",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "BROWSER": "true",  # the program that does nothing: no window opens
    }


def _forget_prediction(plan: Path) -> None:
    """Leaves out what a plan was predicted to do: it was for the small job, and another model is to run under it."""
    plan.write_text(plan.read_text(encoding="utf-8").partition("[prediction]")[0], encoding="utf-8")


def _furnish(folder: Path) -> None:
    job = Path(__file__).with_name("job.py")
    shutil.copy(job, folder / "train.py")
    shutil.copy(job, folder / "spawning.py")
    for name in ("stages.py", "small_gpt.py"):
        shutil.copy(ROOT / "tests" / "virtual" / "rank_jobs" / name, folder / name)
    (folder / "package").mkdir()
    shutil.copy(job, folder / "package" / "train.py")
    (folder / "profiled.py").write_text(_PROFILED, encoding="utf-8")
    for name in ("lab", "sample_traces", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "lengths.txt").write_text("64\n128\n512, 96\n", encoding="utf-8")
