"""Blocks that a few lines of a job take on a virtual card."""

from __future__ import annotations

from pathlib import Path

from memprof.analysis.compared.allocation_sequence import read_sequence
from memprof.launch.dry.dry_snapshots import collect_snapshots
from memprof.launch.parent.target import find_target

_START = "torch.cuda.memory._record_memory_history(max_entries=100_000)"


def allocated(script: str, folder: Path) -> list[int]:
    """Returns the blocks that a script takes on an H200 after START, in order, in bytes rounded up to 512."""
    text = f"import torch\ntorch.cuda.init()\n{script.replace('START', _START)}\n"
    (folder / "job.py").write_text(f'{text}torch.cuda.memory._dump_snapshot("gpu.pickle")\n', encoding="utf-8")
    target = find_target((str(folder / "job.py"),), is_module=False, is_command=False)
    (taken,) = collect_snapshots(target, "h200", "gpu.pickle", folder)
    return [int(size) for size in read_sequence(str(taken)).sizes]
