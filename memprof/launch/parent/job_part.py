"""Which part of a larger job a parent runs: one of several nodes, or one rank, each with its own file."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from memprof.trace.launchers import rank_in

#: Options of torchrun, deepspeed and accelerate for the number of nodes and for this node's rank.
_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines")
_NODE = ("--node_rank", "--node-rank", "--machine_rank", "--machine-rank")


def find_part(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns the name of the part that this parent records: ``node1``, ``rank3``, or "" for the whole job.

    Either one parent per node starts the ranks there (torchrun, accelerate), or a launcher starts one parent per rank
    (mpirun, srun). With the same file name, they would overwrite one another.

    Args:
        arguments: The job's command line.
        environment: The environment of this process.
    """
    # `1:4` is a job of one to four nodes.
    nodes = _option(arguments, _NODES) or environment.get("PET_NNODES", "")
    most = nodes.rpartition(":")[2]
    if most.isdecimal() and int(most) > 1:
        for given in (
            _option(arguments, _NODE),
            environment.get("PET_NODE_RANK", ""),
            environment.get("SLURM_NODEID", ""),
        ):
            if given.isdecimal():
                return f"node{int(given)}"
        # The nodes agree on their numbers only at the rendezvous.
        return f"node-{re.sub(r'[^A-Za-z0-9-]+', '-', platform.node())}"
    rank, size = rank_in(environment)
    return f"rank{rank}" if size > 1 else ""


def with_part(output: Path, part: str) -> Path:
    """Returns the file of a part: ``run.node1.memprof`` for ``run.memprof``."""
    if not part:
        return output
    stem, dot, suffix = output.name.rpartition(".")
    return output.with_name(f"{stem}.{part}.{suffix}" if dot and stem else f"{output.name}.{part}")


def _option(arguments: Sequence[str], names: Sequence[str]) -> str:
    """Returns the value of the first matching option on a command line, "" if there is none."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(arguments[place + 1 : place + 2]), "")
    return ""
