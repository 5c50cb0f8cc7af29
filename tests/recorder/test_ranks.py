"""The rank of a process, under every launcher."""

from __future__ import annotations

import pytest

from memprof.recorder.machine import describe_place, find_rank


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (1, 2)),
        ({"RANK": "2"}, (2, 3)),
        ({"RANK": "8", "WORLD_SIZE": "4"}, (8, 9)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, (0, 1)),
    ],
)
def test_rank_is_told_by_whatever_started_the_process(environment: dict[str, str], told: tuple[int, int]) -> None:
    """torchrun goes before what starts it; a task of a batch script alone is no rank; nonsense is no rank."""
    assert find_rank(environment) == told


def test_place_names_the_machine_and_its_clock() -> None:
    """Two looks from one machine name the same clock."""
    assert describe_place() == describe_place()
    assert describe_place()["node"]
    assert describe_place()["clock"]
