"""Which part of a larger job a parent records, and the file it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.launch.outcome.output import address_of, find_part, with_part

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
