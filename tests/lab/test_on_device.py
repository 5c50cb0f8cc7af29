"""What only a CUDA device can show of the policies: copies on side streams, pinned memory, scaling, random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.policies.swap.transfers import HostCarrier

pytestmark = pytest.mark.gpu

#: So many samples that what is saved takes most of the memory.
WIDTH, LAYERS, BATCH = 512, 6, 8192


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(WIDTH, 4 * WIDTH)
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.shrink(nn.functional.gelu(self.grow(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(*policies: Policy, steps: int = 4, in_stream: bool = False) -> tuple[list[float], list[torch.Tensor], int]:
    """Returns the losses, the final parameters, and the peak of the last step."""
    torch._C._cuda_clearCublasWorkspaces()  # those of streams of earlier runs
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job(model, [optimizer])
    Plan(policies).apply(job)
    inputs = torch.randn(BATCH, WIDTH, device="cuda")
    losses = []
    stream = torch.cuda.Stream() if in_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated()
    state = [p.detach().cpu() for p in model.parameters()]
    job.undo()
    return losses, state, peak


@pytest.fixture(autouse=True)
def one_way_to_compute() -> Iterator[None]:
    """Lets the same kernels run every time, so that results can be equal to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        Swap(modules=("layers.*",), minimum_bytes=0),
        Swap(modules=("layers.*",), minimum_bytes=0, prefetch=0),
        Swap(modules=("layers.*",), minimum_bytes=0, prefetch=4),
        Swap(what="optimizer", minimum_bytes=0),
        Swap(what="parameters", modules=("layers.*",), minimum_bytes=0),
        Checkpoint(modules=("layers.*",)),
        OptimizerPolicy(state="host"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Policy) else None,
)
def test_training_is_the_same_to_the_bit(policy: Policy, in_stream: bool) -> None:
    """What is moved or made again changes no bit, on the default stream and on the job's own; it saves memory."""
    losses, state, peak = train(in_stream=in_stream)
    under, state_under, peak_under = train(policy, in_stream=in_stream)
    assert under == losses
    assert same(state_under, state)
    assert peak_under < peak


def test_scaled_gradients_train_as_in_float32() -> None:
    """Under fp16 with scaling inside the model, losses go down with those of float32."""
    losses, _, _ = train(steps=8)
    scaled, _, _ = train(Precision(dtype="fp16"), steps=8)
    assert scaled == pytest.approx(losses, rel=0.02)


def test_a_step_that_overflows_is_skipped() -> None:
    """An overflow of fp16 leaves the parameters as they were and halves the scale; the next step trains."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job(model, [optimizer])
    Plan((Precision(dtype="fp16"),)).apply(job)
    before = [p.detach().clone() for p in model.parameters()]
    for factor, is_skipped in ((1e30, True), (1.0, False)):
        optimizer.zero_grad()
        (model(torch.randn(8, WIDTH, device="cuda")).square().mean() * factor).backward()
        optimizer.step()
        assert same([p.detach() for p in model.parameters()], before) == is_skipped
    job.undo()


def test_copies_run_beside_the_computation() -> None:
    """A copy out and products on the computing stream together take less time than one after the other."""
    carrier = HostCarrier(torch.device("cuda", torch.cuda.current_device()))
    storage = torch.ones(64 << 20, dtype=torch.float32, device="cuda").untyped_storage()
    matrix = torch.ones(4096, 4096, device="cuda")

    def copy() -> None:
        place = carrier.send(storage)
        carrier.close()
        carrier.forget(place, None)

    def compute() -> None:
        for _ in range(10):
            torch.mm(matrix, matrix)

    def both() -> None:
        place = carrier.send(storage)
        compute()
        carrier.close()
        carrier.forget(place, None)

    apart, together = fastest_s(copy) + fastest_s(compute), fastest_s(both)
    assert together < 0.9 * apart


def test_memory_is_not_given_back_before_it_is_copied() -> None:
    """Writes into memory that a storage left do not reach the copy, however late the copy is."""
    device = torch.device("cuda", torch.cuda.current_device())
    carrier = HostCarrier(device)
    for value in range(20):
        source = torch.full((16 << 20,), float(value), device=device)
        place = carrier.send(source.untyped_storage())
        carrier.sent(place)
        del source
        torch.full((16 << 20,), -1.0, device=device)  # in the same memory
        back = carrier.fetch(place)
        carrier.fetched(place)
        values = torch.empty(0, device=device).set_(back)
        assert bool((values == value).all())
        carrier.forget(place, back)


def fastest_s(run: Callable[[], None]) -> float:
    """Returns the fastest of some runs, the device's work included."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
