"""Blocks that a few lines of a job take on a virtual card."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from memprof.analysis.compared.allocation_sequence import read_sequence
from memprof.launch.dry.dry_outcome import collect_snapshots
from memprof.launch.parent.target import find_target

_START = "torch.cuda.memory._record_memory_history(max_entries=100_000)"
#: A block between what two operations take; nothing else has its size.
_MARK = 12_345 * 512


def allocated(script: str, folder: Path) -> list[int]:
    """Returns the blocks that a script takes on an H200 after START, in order, in bytes rounded up to 512."""
    text = f"import torch\ntorch.cuda.init()\n{script.replace('START', _START)}\n"
    (folder / "job.py").write_text(f'{text}torch.cuda.memory._dump_snapshot("gpu.pickle")\n', encoding="utf-8")
    target = find_target((str(folder / "job.py"),), is_module=False, is_command=False)
    (taken,) = collect_snapshots(target, "h200", "gpu.pickle", folder)
    return [int(size) for size in read_sequence(str(taken)).sizes]


def allocated_by_each(jobs: Mapping[str, tuple[str, str]], folder: Path) -> dict[str, list[int]]:
    """Returns the blocks that each of several operations takes in one script, as ``allocated`` does.

    Args:
        jobs: By name, what stands before an operation, and the operation.
        folder: An empty folder.
    """
    mark = f"torch.empty({_MARK}, dtype=torch.uint8, device='cuda')"
    lines = ["START"]
    for number, (before, operation) in enumerate(jobs.values()):
        body = textwrap.indent("\n".join([before, mark, operation, mark]), "    ")
        lines.append(f"def job{number}():\n{body}\njob{number}()")
    sizes = allocated("\n".join(lines), folder)
    marks = [place for place, size in enumerate(sizes) if size == _MARK]
    return {name: sizes[start + 1 : end] for name, (start, end) in zip(jobs, list(pairwise(marks))[::2], strict=True)}
