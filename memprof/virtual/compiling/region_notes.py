"""Notes on the regions of a dry run: how many graphs were compiled, and what ran eagerly instead."""

from __future__ import annotations

from collections import Counter

import torch

from memprof.recorder.compiled.memory_settings import INITIAL_POOL, MemorySettings, compiler_setting
from memprof.trace.files.spool import COMPILED, RAN_EAGERLY
from memprof.units import format_count


class RegionNotes:
    """Counts of graphs and regions.

    Attributes:
        graphs: Graphs that were compiled.
        unplaced: Those among them whose modules and lines are unknown.
        settings: The settings that they were compiled under.
        has_cuda_graphs: Whether a real run keeps memory in the pools of CUDA graphs.
    """

    def __init__(self, *, is_virtual: bool) -> None:
        """Counts from 0.

        Args:
            is_virtual: Whether the job runs on a virtual GPU.
        """
        self.graphs = self.unplaced = 0
        self.settings = MemorySettings()
        self.has_cuda_graphs = False
        self._is_virtual = is_virtual
        self._eager: Counter[str] = Counter()

    def leave(self, reason: str) -> None:
        """Counts a region that runs eagerly here, and is compiled in a real run."""
        self._eager[f", and a real run differs: {reason}"] += 1

    def fail(self, error: Exception) -> None:
        """Counts a region that torch fails to compile here, which a real run need not fail."""
        cause = error.__cause__ or error.__context__
        said = first_line(error)
        inner = first_line(cause) if isinstance(cause, Exception) else ""
        said += f" ({inner})" if inner and inner not in said else ""
        self._eager[f" since it did not compile in this dry run, and may in a real run: {said}"] += 1

    def sentences(self) -> list[str]:
        """Returns notes for the reader of the recording."""
        notes = []
        if self.graphs:
            compared = ", not compared with a run on a GPU" if self._is_virtual else ""
            graphs = format_count(self.graphs, "graph")
            notes.append(f"{COMPILED}: {graphs} compiled as in a real run, up to the kernels{compared}")
        notes += self.settings.sentences()
        if self.has_cuda_graphs:
            first = compiler_setting("torch._inductor.config", INITIAL_POOL)
            is_set = isinstance(first, float | int) and first > 0
            of_these = f", of which {first} GiB are allocated when the pool is made" if is_set else ""
            notes.append(
                f"{COMPILED}: memory that a real run keeps in the pools of CUDA graphs is not counted{of_these}"
            )
        if self.unplaced:
            graphs = format_count(self.unplaced, "graph")
            notes.append(f"{COMPILED}: modules and lines inside {graphs} are unknown with torch {torch.__version__}")
        for reason, count in self._eager.items():
            notes.append(f"{COMPILED}: {format_count(count, 'region')} {RAN_EAGERLY}{reason}")
        return notes


def first_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
