"""Records jobs at several sizes in this process, so that a step learned from some can be compared with the others.

`python -m tests.planners.sizes gpt lstm` prints how far the peaks predicted for batches of 12 and 16 are from those
measured, learned from batches of 4 and 8, and by the rule from a batch of 8 alone.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import memprof
from memprof.planners.scaling.base import scale_by_shape
from memprof.planners.scaling.samples import Sample
from memprof.planners.scaling.sized import MeasuredSizes, SizedStep, scale_samples
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import JOBS, load_job, record_step

#: Samples in the data set of a job, whatever the batch: it is alive all the time.
SAMPLES = 128


class Attention(nn.Module):
    """Attention written out: its scores grow with the square of the length."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (parts[0] @ parts[1].transpose(-2, -1) / width**0.5).softmax(-1)
        return self.out((scores @ parts[2]).transpose(1, 2).reshape(batch, length, width))


def train_attention(length: int, steps: int = 3) -> None:
    """Trains two layers of attention on sequences of a length."""
    model = nn.Sequential(Attention(), nn.GELU(), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, length, 32)).square().mean().backward()
        optimizer.step()


def train_images(batch: int, steps: int = 3, *, twice: bool = False) -> None:
    """Trains a small convolutional network; ``twice`` runs its last layer again, as nobody should."""
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head = nn.Linear(8 * 8 * 8, 10)
    model = nn.ModuleList([features, head])
    optimizer = torch.optim.Adam(model.parameters())
    images: Dataset[torch.Tensor] = Images()
    for step, batch_of in enumerate(DataLoader(images, batch_size=batch)):
        if step == steps:
            break
        optimizer.zero_grad()
        out = features(batch_of)
        loss = F.cross_entropy(head(out), torch.zeros(len(out), dtype=torch.long))
        if twice:
            loss = loss + head(out).sum()
        loss.backward()
        optimizer.step()


class Images(Dataset[torch.Tensor]):
    """Images that are made as they are asked for: loading runs operators, and takes memory, for every sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 16, 16), index / SAMPLES) * 2


@contextmanager
def in_a_small_process() -> Iterator[None]:
    """Hides what the tests imported from the recorder, which looks through all objects, and takes one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def record(train: Callable[[], None]) -> Step:
    """Records the third step of a training loop."""
    with in_a_small_process(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memprof"
        with memprof.record(path, skip=2, steps=1):
            train()
        step = Trace.open(path).steady_step()
        step.check()
        return step


def record_job(name: str, batch: int) -> Step:
    """Records a step of one of the jobs of tests/policies at another batch, its data set unchanged."""
    job = load_job(name)
    make, size = job.make_loader, job.BATCH
    job.BATCH = SAMPLES // 8
    job.make_loader = lambda: DataLoader(make().dataset, batch_size=batch)
    try:
        with in_a_small_process():
            return record_step(name)
    finally:
        job.make_loader, job.BATCH = make, size


def scale_between(steps: dict[int, Step]) -> MeasuredSizes:
    """Fits how a job's step grows, from a step of a recording at each size."""
    return scale_samples([Sample(step, size, run) for run, (size, step) in enumerate(sorted(steps.items()))])


def peak_bytes(step: Step) -> int:
    """Returns a step's peak."""
    return int(live_bytes(step).during.max())


def error(sized: SizedStep, size: int, measured: Step) -> float:
    """Returns how far the predicted peak is from the measured one, as a share of it."""
    predicted = sized.step_at(size)
    predicted.check()
    return peak_bytes(predicted) / peak_bytes(measured) - 1


def main() -> None:
    for name in sys.argv[1:] or JOBS:
        steps = {batch: record_job(name, batch) for batch in (4, 8, 12, 16)}
        learned = {
            "4 and 8": scale_between({4: steps[4], 8: steps[8]}),
            "4, 8 and 12": scale_between({batch: steps[batch] for batch in (4, 8, 12)}),
            "8 alone (rule)": scale_by_shape(steps[8]),
        }
        for how, sized in learned.items():
            told = ", ".join(
                f"{batch}: {peak_bytes(sized.step_at(batch)):,} of {peak_bytes(steps[batch]):,} "
                f"({error(sized, batch, steps[batch]):+.3%})"
                for batch in (12, 16)
            )
            print(f"{name:7} from {how:15} {told}", flush=True)


if __name__ == "__main__":
    main()
