"""What a recorded step shows of the loop that feeds it."""

from __future__ import annotations

from memprof.trace.step import Step

#: In the stack of every operator that a DataLoader runs.
DATA_LOADER = "torch/utils/data/dataloader.py:"


def reads_loader(step: Step) -> bool:
    """Returns whether a DataLoader yields the batches of the job."""
    return runs_in(step, DATA_LOADER)


def runs_in(step: Step, place: str) -> bool:
    """Returns whether operators ran below a place: part of a file's path, as stacks have it."""
    return any(place in str(frames) for frames in step.stacks.frames)
