"""The .memprof files of one trace: a single file, a folder of them, or the parts that a job's nodes wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.files.archive import unreadable
from memprof.trace.files.container import Container, FileRank, read_container
from memprof.trace.manifest import number_ranks
from memprof.trace.rank_summary import join_summaries, summarise_rank
from memprof.trace.schema import RANK_TABLES, Ints, Table


@dataclass(frozen=True)
class Files:
    """Files that are read as one trace."""

    containers: tuple[Container, ...]
    ranks: Mapping[int, FileRank]

    def summarise(self) -> dict[type[Table], Table]:
        """Reads the rank summaries of all files; for a file without summaries, each of its ranks is read to build them.

        Returns:
            Every table of ``RANK_TABLES``, over all ranks.

        Raises:
            BadInputError: A table is damaged.
        """
        return join_summaries(self._of_container(container) for container in self.containers)

    def _of_container(self, container: Container) -> dict[type[Table], Table]:
        members = [(number, rank) for number, rank in self.ranks.items() if rank.archive is container.archive]
        if not container.is_summed_up:
            return join_summaries(summarise_rank(rank.manifest, rank) for _, rank in members)
        new_number = {rank.number: number for number, rank in members}
        if all(old == new for old, new in new_number.items()):
            return {kind: container.read(kind) for kind in RANK_TABLES}
        return {kind: _renumbered(container.read(kind), new_number) for kind in RANK_TABLES}


def find_files(path: Path) -> list[Path]:
    """Lists the files that a path refers to.

    Args:
        path: A file, a folder of files, or the common name of the parts of several nodes or ranks:
            ``run.memprof`` where there are ``run.node0.memprof`` and ``run.node1.memprof``.

    Returns:
        The files, by name; the path itself if nothing else matches.

    Raises:
        BadInputError: The folder holds no recording, or the recording was never packed.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.glob("*.memprof") if file.is_file())
            if not files:
                raise BadInputError(f"the folder {path} holds no .memprof file, nor the spool of a recording.")
            return files
        if path.exists():
            return [path]
        parts = find_parts(path)
        spool = path.parent / f"{path.name}.spool"
        if not parts and spool.is_dir():
            raise BadInputError(f"no file {path}, since its recording was not packed: open {spool} instead.")
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:  # a null character in the name
        raise unreadable(path, error) from error
    return parts or [path]


def find_parts(path: Path) -> list[Path]:
    """Lists the files that nodes or ranks of one job wrote under a common name.

    Raises:
        OSError: The folder cannot be read.
    """
    stem = path.name.removesuffix(".memprof")
    if not stem or stem == path.name or not path.parent.is_dir():
        return []
    part = re.compile(re.escape(stem) + r"\.(?:node\d+|node-[\w-]+|rank\d+)\.memprof")
    return sorted(file for file in path.parent.glob("*.memprof") if part.fullmatch(file.name))


def read_files(path: Path) -> Files:
    """Reads the manifests of the files that a path refers to.

    Raises:
        BadInputError: Nothing exists there, or a file is empty, cut short, damaged, foreign or from a newer memprof.
    """
    containers = tuple(read_container(file) for file in find_files(path))
    return Files(containers, _by_rank([rank for container in containers for rank in container.ranks]))


def _by_rank(ranks: Sequence[FileRank]) -> dict[int, FileRank]:
    manifests = number_ranks([rank.manifest for rank in ranks])
    numbered = zip(manifests, ranks, strict=True)
    return {manifest.rank: replace(rank, manifest=manifest) for manifest, rank in numbered}


def _renumbered(table: Table, new_number: Mapping[int, int]) -> Table:
    numbers: Ints = getattr(table, "rank")  # noqa: B009 - every table of RANK_TABLES has it, but Table does not declare it
    old, places = np.unique(numbers, return_inverse=True)
    new = np.array([new_number.get(int(number), int(number)) for number in old], dtype=np.int64)
    return table.replace(rank=new[places] if len(new) else numbers)
