"""Rank and world size that launchers put in the environment of each process of a distributed job."""

from __future__ import annotations

from collections.abc import Mapping

#: Rank and number of processes: torchrun, accelerate and deepspeed, Open MPI, MVAPICH, MPICH and Intel MPI, PALS, IBM's
#: jsrun, SLURM's srun (the size of the step: a batch script itself is not a task), Flux.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_NRANKS"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
)


def rank_texts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what of an environment says which process of a job this is; empty where nothing does."""
    names = ("LOCAL_RANK", *(rank_name for rank_name, _ in _NAMES))
    return tuple(f"{name}={environment[name]}" for name in names if name in environment)


def rank_in(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank and the number of processes given by an environment; 0 of 1 where it has none."""
    for rank_name, size_name in _NAMES:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    rank = environment.get("RANK", "")
    # Without a number of processes, assume the smallest that contains the rank.
    return (int(rank), int(rank) + 1) if rank.isdecimal() else (0, 1)
