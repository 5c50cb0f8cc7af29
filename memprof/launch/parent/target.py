"""The job to run: a script, a module or a command, located before anything starts; once per rank with torchrun."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import MemprofError, UsageError

if TYPE_CHECKING:
    from memprof.policies.plan.plan import Plan

#: Used instead of a script: Python reads the program from stdin.
STDIN = "-"
#: Variable that lets jobs be recorded on systems on which that is not tested.
ANY_SYSTEM = "MEMPROF_ANY_SYSTEM"
#: Maximum number of ranks of a dry run.
MOST_RANKS = 1024
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class CannotStartError(MemprofError):
    """The recording cannot start, through no fault of the job."""

    exit_code = 125


class NotExecutableError(MemprofError):
    """The target exists but cannot be run."""

    exit_code = 126


class NotFoundError(MemprofError):
    """The target does not exist."""

    exit_code = 127


@dataclass(frozen=True)
class Target:
    """A job to start.

    Attributes:
        arguments: The command line of the child process, program first.
        name: The script, module or program, as the user wrote it.
    """

    arguments: tuple[str, ...]
    name: str

    def __post_init__(self) -> None:
        """Checks that jobs can be recorded on this system.

        Raises:
            CannotStartError: They cannot.
        """
        if sys.platform != "linux" and os.environ.get(ANY_SYSTEM, "") in ("", "0"):
            system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
            raise CannotStartError(
                f"recording needs Linux; on {system}, memprof reads, compares and plans recordings made there "
                f"({ANY_SYSTEM}=1 records anyway, which is not tested)."
            )

    @property
    def stem(self) -> str:
        """The name without folder and suffix, for the default output file."""
        if self.name == STDIN:
            return "stdin"
        return Path(self.name).name.removesuffix(".py") or "job"


def find_script(words: Sequence[str]) -> Target:
    """Returns the job ``python script.py arguments``.

    Args:
        words: The script and its arguments; ``-`` for a program on stdin.

    Raises:
        NotFoundError: The script does not exist.
        NotExecutableError: It cannot be read.
    """
    script = words[0]
    try:
        # Python also runs a folder or a zip archive with a __main__.py.
        if script != STDIN and not os.path.isdir(script):
            with open(script, "rb"):
                pass
    except PermissionError:
        raise NotExecutableError(f"the script {script} cannot be read: check its permissions.") from None
    except OSError as error:
        reason = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        raise NotFoundError(f"no script {script} here{reason}: check its name and folder.") from None
    return Target((sys.executable, *words), script)


def find_module(words: Sequence[str]) -> Target:
    """Returns the job ``python -m module arguments``; Python itself reports a missing module."""
    return Target((sys.executable, "-m", *words), words[0])


def find_command(words: Sequence[str]) -> Target:
    """Returns the job for a command line.

    Raises:
        NotFoundError: The program does not exist.
        NotExecutableError: The file is not executable.
    """
    program = words[0]
    if os.sep in program:
        candidates = [program]
    else:
        candidates = [os.path.join(folder, program) for folder in os.get_exec_path()]
    there = [path for path in candidates if os.path.exists(path)]
    if not program or not there:
        raise NotFoundError(f"no command {program}: check its name, or write its full path.")
    if not any(os.access(path, os.X_OK) and not os.path.isdir(path) for path in there):
        raise NotExecutableError(f"{there[0]} is not a program that can be run: check its permissions.")
    return Target(tuple(words), _script_of(words))


def find_target(words: Sequence[str], *, is_module: bool, is_command: bool, verb: str = "record") -> Target:
    """Returns the job described by the words after memprof's own options.

    Args:
        words: The target and its arguments, verbatim.
        is_module: They were preceded by ``-m``.
        is_command: They were preceded by ``--``.
        verb: The verb, for messages.

    Raises:
        UsageError: No command was given, or both ``-m`` and ``--`` were given.
        NotFoundError: The script or program does not exist.
        NotExecutableError: It cannot be run.
    """
    if not words:
        raise UsageError(f"nothing to {verb}: name a script, memprof {verb} train.py")
    if is_module and is_command:
        raise UsageError("-m names a Python module, -- a command: give one of them.")
    if is_module:
        return find_module(words)
    return find_command(words) if is_command else find_script(words)


#: Finds scripts in a shell command: ``TOKEN=x python -m package.train``, ``cd /job && ./train.py --lr 1``.
_MODULE_IN = re.compile(r"\bpython[\d.]*\s+-m\s+([\w.]+)")
_SCRIPT_IN = re.compile(r"(?<![^\s'\";|&(])[^\s'\";|&=()]+\.py(?![\w.])")


def _script_in(program: str) -> str:
    """Returns the script that a shell command runs; "" if the word is not a command or runs no script."""
    if not any(map(str.isspace, program)) or os.path.exists(program):
        return ""
    module, script = _MODULE_IN.search(program), _SCRIPT_IN.search(program)
    return module[1] if module is not None else script[0] if script is not None else ""


def _script_of(words: Sequence[str]) -> str:
    """Returns the most specific word of a command: torchrun and accelerate are common to all jobs, train.py is not."""
    for position, word in enumerate(words[1:], start=1):
        if script := _script_in(word):
            return script
        if word.endswith(".py"):
            return word
        if word == "-m" and position + 1 < len(words):
            return words[position + 1]
    return words[0]


def ranks_of(plan: Plan | None) -> int:
    """Returns the number of ranks that a plan shards its job over; 1 if it does not.

    Raises:
        CannotStartError: The plan shards twice, over different numbers of ranks.
    """
    sizes = {getattr(policy, "world_size", 1) for policy in plan.policies} if plan is not None else set()
    sizes -= {1}
    if len(sizes) > 1:
        raise CannotStartError(f"the plan shards over {' and '.join(map(str, sorted(sizes)))} ranks: leave one out.")
    return sizes.pop() if sizes else 1


def check_ranks(
    target: Target, ranks: int, nodes: int, plan_ranks: int, environment: Mapping[str, str], *, dry_run: bool
) -> None:
    """Rejects ranks that a dry run cannot start.

    Args:
        target: The user's target.
        ranks: Ranks of the job; 0 if not given.
        nodes: Machines, each with the same number of ranks.
        plan_ranks: Ranks of the plan; 1 if it shards nothing.
        environment: The environment, which may mark this process as a rank.
        dry_run: Whether the job is dry-run.

    Raises:
        CannotStartError: With the reason.
    """
    if not dry_run:
        raise CannotStartError("--ranks and --nodes are for dry runs: add --dry-run, or start the ranks with torchrun.")
    if not ranks:
        raise CannotStartError("--nodes divides --ranks among machines: add --ranks 64.")
    if ranks > MOST_RANKS:
        raise CannotStartError(f"--ranks {ranks:,} exceeds the maximum of {MOST_RANKS:,}.")
    if ranks % nodes:
        raise CannotStartError(f"{ranks:,} ranks cannot be divided evenly among {nodes:,} nodes.")
    if plan_ranks > 1:
        raise CannotStartError(
            "--ranks is for distributed scripts, and --shard for scripts that are not: leave one out."
        )
    if "WORLD_SIZE" in environment:
        raise CannotStartError("WORLD_SIZE is set: this process is a rank already. Leave out --ranks, or unset it.")
    if not _is_python(target):
        raise CannotStartError(f"--ranks starts the ranks itself: name the script in place of {target.arguments[0]}.")


def _is_python(target: Target) -> bool:
    """Whether a target is a script or a module, rather than a command."""
    return target.arguments[0] == sys.executable and target.name in target.arguments[1:3]


def on_ranks(target: Target, ranks: int, environment: Mapping[str, str]) -> Target:
    """Returns the job that runs a script or module once per rank.

    Args:
        target: The user's target. A command is left unchanged: it is torchrun, srun or another launcher.
        ranks: Ranks of the plan.
        environment: The environment; if it marks this process as a rank, the other ranks are already started.
    """
    if ranks == 1 or not _is_python(target) or "WORLD_SIZE" in environment:
        return target
    return replace(target, arguments=(sys.executable, *_TORCHRUN, str(ranks), *target.arguments[1:]))


def threads_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns OMP_NUM_THREADS, dividing the cores among ranks; torchrun would set it to 1 with a long warning."""
    if ranks == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def first_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for rank 0 of the given number of ranks, for a dry run of it."""
    if ranks == 1 or "WORLD_SIZE" in environment:
        return {}
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    count = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return {**own, **count, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
