"""Twenty kinds of running jobs, and more: what each runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.zoo_catalog import ZOO

PROGRAMS = Path(__file__).parent / "programs"
_PACED = str(PROGRAMS / "paced.py")


@dataclass(frozen=True)
class Kind:
    """One kind of job.

    Attributes:
        name: What is special about it.
        words: The program and its arguments.
        step: What ends a step: an optimizer's ``update``, a module's ``call``, or the program's ``own`` lines.
        before: Words after the interpreter, in front of the program; `{folder}` is a folder of its own.
        is_paced: Run by ``paced.py``; otherwise the program paces itself.
        noise: A regular expression of what differs between two plain runs.
        ends: It may end before anything attached to it.
        variables: Set in its environment.
    """

    name: str
    words: tuple[str, ...]
    step: str = "update"
    before: tuple[str, ...] = ()
    is_paced: bool = True
    noise: str = ""
    ends: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, python: str, folder: Path) -> list[str]:
        """Returns the command that runs it."""
        paced = [_PACED] if self.is_paced else []
        return [python, *(word.format(folder=folder) for word in self.before), *paced, *self.words]


def _zoo(name: str, script: str, *words: str, step: str = "update", noise: str = "") -> Kind:
    return Kind(name, (str(ZOO / f"{script}.py"), *words), step, noise=noise)


def _own(name: str, program: str, *words: str, step: str = "own", ends: bool = False) -> Kind:
    return Kind(name, (str(PROGRAMS / f"{program}.py"), *words), step, ends=ends)


def _hostile(name: str, what: str, *before: str, **variables: str) -> Kind:
    words = (str(PROGRAMS / "hostile.py"), what)
    return Kind(f"hard: {name}", words, "own", before, variables=tuple(variables.items()))


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_RECORD = ("-m", "memprof.cli.main", "record", "-q", "-f", "-o", "{folder}/own.memprof")

KINDS = (
    _zoo("zoo: convolutions", "mnist"),
    _zoo("zoo: two optimizers", "dcgan"),
    _own("Trainer", "trainer", step="update"),
    _own("Lightning", "lightning_fit", step="update"),
    _own("Accelerate", "accelerated", step="update"),
    _zoo("DataLoader workers", "dataloader_workers"),
    _zoo("compiled, aot_eager", "techniques", "compiled", "aot_eager"),
    _zoo("compiled, inductor", "techniques", "compiled", "inductor"),
    Kind("two gloo ranks", (str(PROGRAMS / "ranks.py"),), "own", _TORCHRUN, is_paced=False),
    Kind("notebook kernel", (str(PROGRAMS / "notebook.py"),), "own", is_paced=False),
    _own("native, no GIL", "native", "matmul"),
    _own("native, asleep", "native", "sleep"),
    _own("native, GIL held", "native", "locked"),
    _own("asleep for long", "native", "idle"),
    _own("exits meanwhile", "ending", "exit", "0.5", ends=True),
    _own("raises meanwhile", "ending", "raise", "0.7", ends=True),
    _own("is ended meanwhile", "ending", "kill", "0.9", ends=True),
    _own("ends hard meanwhile", "ending", "hard", "1.1", ends=True),
    _own("threads train", "flow", "threads"),
    _own("main thread waits", "flow", "joined"),
    _own("generators", "flow", "generator"),
    _own("asyncio", "flow", "asyncio"),
    _own("a pool", "flow", "pool"),
    _own("forks", "flow", "fork"),
    _zoo("own profiler", "own_profiler", noise="Memory block of unknown size was allocated before"),
    _zoo("own dispatch mode", "own_dispatch_mode"),
    Kind("recorded already", (str(ZOO / "mnist.py"),), "update", _RECORD),
    _zoo("checkpointed backward", "techniques", "activation_checkpointing"),
    _zoo("sparse embeddings", "sparse_embedding"),
    _zoo("loader in a thread", "threaded_loader"),
    _zoo("inference", "loops", "inference_only", step="call"),
    _own("full speed", "busy", "400"),
    _own("subclass, full speed", "busy", "400", "subclass"),
    _hostile("signal handlers", "signals"),
    _hostile("seccomp", "seccomp"),
    _hostile("faulthandler", "faults"),
    _hostile("a thread forks", "forks"),
    _hostile("sys.settrace", "traced"),
    _hostile("coverage", "plain", "-m", "coverage", "run", "--data-file", "{folder}/coverage"),
    _hostile("small stacks", "stacks"),
    _hostile("RLIMIT_AS", "memory"),
    _hostile("no file left", "files"),
    _hostile("gevent", "greenlets"),
    _hostile("gc.freeze", "frozen"),
    _hostile("deep recursion", "deep"),
    _hostile("PYTHONMALLOC", "plain", PYTHONMALLOC="debug"),
    _hostile("python -X dev", "plain", "-X", "dev"),
    _hostile("python -X perf", "plain", "-X", "perf"),
    _hostile("python -OO -s", "plain", "-OO", "-s"),
)


def chosen(names: list[str]) -> Iterator[Kind]:
    """Yields the kinds whose names contain one of these; all where there are none."""
    yield from (kind for kind in KINDS if not names or any(name in kind.name for name in names))
