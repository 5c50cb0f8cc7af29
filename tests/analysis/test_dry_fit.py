"""Whether a job fits a simulated device, and what it takes of host memory in budgets."""

from __future__ import annotations

import json
import tomllib
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.analysis.allocator.device_verdict import DryFit, dry_fit, judge_device
from memprof.analysis.allocator.uncertainty import beyond_tensors
from memprof.analysis.host.host_forecast import HostForecast, Loader, describe_fewer_workers, describe_smaller_prefetch
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.plans.host_budget import describe_host, with_host
from memprof.cli.main import main
from memprof.errors import UsageError
from memprof.machines.budget import HostBudget
from memprof.machines.catalogue import CONTEXT_BYTES, find_machine
from memprof.machines.outside import LAZY, NCCL
from memprof.planners.search.request import SearchRequest
from memprof.recorder.steps.loaders import data_sizes
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Backend, Machine, Manifest
from memprof.trace.schema import HostLimits, HostMemory, HostNeeds, Stacks, Table
from memprof.trace.store import Trace
from memprof.units import format_bytes, spell_bytes_below
from tests.recorder.recorded import record, record_script

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("reserved", "sentence", "fits"),
    [
        (22 * _GIB, "Fits on RTX 4090: needs 22.14 to 22.75 GiB of 23.00 GiB", True),
        (22 * _GIB + _GIB // 2, "May not fit on RTX 4090: needs 22.64 to 23.25 GiB of 23.00 GiB", False),
        (24 * _GIB, "Does not fit on RTX 4090: needs 24.14 to 24.75 GiB of 23.00 GiB (at least 1.14 GiB short)", False),
    ],
)
def test_a_job_fits_if_it_does_with_the_upper_end(reserved: int, sentence: str, fits: bool) -> None:
    """Between the ends the sentence says that it may not; beyond the lower one, by how much at least."""
    fit = DryFit(
        machine="RTX 4090",
        capacity_bytes=23 * _GIB,
        least_outside_bytes=LAZY.least_bytes,
        outside_bytes=LAZY.most_bytes,
        reserved_bytes=reserved,
        allocated_bytes=20 * _GIB,
        largest="activation",
        share=0.5,
    )
    assert fit.describe().startswith(sentence)
    assert fit.fits is fits
    assert ("Largest category: activation" in fit.describe()) is not fits


def test_communicators_widen_the_interval_and_name_their_source() -> None:
    """A job of one rank has none; each adds NCCL's published figures."""
    assert LAZY.plus(NCCL, 0) == LAZY
    both = LAZY.plus(NCCL, 2)
    assert both.least_bytes == LAZY.least_bytes + 2 * NCCL.least_bytes
    assert both.most_bytes == CONTEXT_BYTES + 2 * NCCL.most_bytes
    assert NCCL.source in both.source


_MIB = 1 << 20


_JOB = """
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3), nn.Flatten(), nn.Linear(WIDTH, 10))
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 3, 32, 32, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_workspaces_of_convolutions_are_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """cuDNN's block of 128 MiB and a weight more, the largest estimate less; the upper end decides."""
    done = record_script(tmp_path, _JOB.replace("WIDTH", str(256 * 28 * 28)), "--dry-run", "--device", "rtx4090")
    fit = dry_fit(done.trace)
    assert fit is not None
    # Float32: inputs [8, 64, 30, 30], weights [256, 64, 3, 3] and results [8, 256, 28, 28] of the larger convolution.
    weight = 256 * 64 * 9 * 4
    tensors = 4 * 8 * (64 * 30 * 30 + 256 * 28 * 28) + weight + 512  # and what is needed with their copies
    assert fit.workspace_bytes == (-tensors, 128 * _MIB + weight)
    assert fit.used_bytes == fit.reserved_bytes + 128 * _MIB + weight + LAZY.most_bytes
    assert fit.least_used_bytes == fit.reserved_bytes - tensors + LAZY.least_bytes
    assert "for workspaces of convolutions, which cuDNN chooses" in done.stderr
    assert any("from none to 128.00 MiB" in note for note in done.trace.manifest.notes)
    full = replace(fit, capacity_bytes=fit.used_bytes - 1)
    assert not full.fits
    assert full.describe().startswith("May not fit")
    _check_that_plans_leave_it_free(done.trace, fit, capsys)


def _check_that_plans_leave_it_free(trace: Trace, fit: DryFit, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that reserves the whole budget of every command fits by the verdict; one byte more does not."""
    room = beyond_tensors(trace).room_bytes
    assert room == fit.workspace_bytes[1]
    assert beyond_tensors(trace, world_size=8).room_bytes == room + NCCL.most_bytes
    card = find_machine("rtx4090")
    for command in ("suggest", "diff"):
        assert main([command, str(trace.path), "--machine", "rtx4090", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["budget_bytes"] == card.budget_bytes - room, command
    for words, sentence in (("--machine rtx4090", "leaves"), ("--budget 20GiB", f"{format_bytes(room)} larger on")):
        assert main(["suggest", str(trace.path), *words.split()]) == 0
        assert sentence in " ".join(capsys.readouterr().out.split())
    assert replace(fit, reserved_bytes=card.budget_bytes - room).fits
    assert not replace(fit, reserved_bytes=card.budget_bytes - room + 1).fits
    verdict = judge_device(trace)
    assert verdict.budget == spell_bytes_below(card.budget_bytes - room)
    assert verdict.counts_reserved


_PUBLISHED = Path(__file__).parents[2] / "lab" / "benchmarks" / "published"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet_64", "unet_128", "unet_256", "unet_512_1024"])
def test_published_peaks_of_u_nets_lie_in_the_interval(tmp_path: Path, name: str) -> None:
    """Single predictions of these are 14 % too low to 3 % too high."""
    peaks = tomllib.loads((_PUBLISHED / "peaks.toml").read_text(encoding="utf-8"))["peak"]
    published = next(peak["bytes"] for peak in peaks if peak["id"] == name)
    job = str(_PUBLISHED / "jobs" / f"{name}.py")
    done = record(tmp_path, "--dry-run", "--device", "v100-sxm2-16gb", job, name="run.memprof")
    fit = dry_fit(done.trace)
    assert fit is not None
    less, more = fit.workspace_bytes
    assert fit.allocated_bytes + less <= published <= fit.allocated_bytes + more


_SPECTRAL = """
import torch
from torch import nn

class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 1)
        self.weight = nn.Parameter(torch.rand(8, 128, 65, dtype=torch.cfloat))
    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(self.conv(x)) * self.weight, s=(128, 128))

model = Spectral().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4096, 1, 128, 128, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_work_areas_of_fourier_transforms_are_an_interval_too(tmp_path: Path) -> None:
    """Of a convolution and a transform, the one that may take more counts; both are named, with their sources."""
    done = record_script(tmp_path, _SPECTRAL, "--dry-run", "--device", "rtx4090")
    fit = dry_fit(done.trace)
    assert fit is not None
    # The complex side: [4096, 8, 128, 65] of 8 B. Backward transforms all of [4096, 8, 128, 128], which is 4 GiB: eight
    # times that and less than was counted is more than cuDNN's 128 MiB.
    whole = 4096 * 8 * 128 * 128 * 8
    assert 8 * whole - 2 * whole <= fit.workspace_bytes[1] <= 8 * whole
    assert "convolutions, which cuDNN chooses, and of Fourier transforms, which cuFFT chooses" in done.stderr
    assert any("one to eight times its complex elements" in note for note in done.trace.manifest.notes)
    assert beyond_tensors(done.trace).room_bytes > find_machine("rtx4090").budget_bytes
    assert judge_device(done.trace).budget == ""


_ENDS_IN_ITS_DATA = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.nn.Dropout()(torch.rand(1 << 16))
raise ValueError("bad image")
"""


def test_a_job_that_ends_before_it_computes_on_the_card_has_no_need(tmp_path: Path) -> None:
    """Only operators on the host ran, whose allocator reserves nothing: no "-1 B reserved"."""
    done = record_script(tmp_path, _ENDS_IN_ITS_DATA, "--dry-run", "--device", "rtx4090")
    assert done.returncode == 1
    assert "reserved" not in done.stderr
    assert dry_fit(Trace.open(done.path)) is None


MIB, GIB = 1 << 20, 1 << 30


def trace(device_name: str = "NVIDIA H100 80GB HBM3", backend: str = "cuda-native") -> Trace:
    """Returns a job that takes 6 GiB, of which two workers have 2 GiB each, on a host with 8 of 10 GiB in use."""
    samples = HostMemory.of(
        time_us=[1.0] * 3,
        pid=[1, 2, 3],
        role=["trainer", "worker", "worker"],
        rss_bytes=[2 * GIB] * 3,
        private_bytes=[2 * GIB] * 3,
        heap_bytes=[2 * GIB] * 3,
        anonymous_bytes=[2 * GIB] * 3,
    )
    limits = HostLimits.of(time_us=[1.0], name=["machine"], total_bytes=[10 * GIB], used_bytes=[8 * GIB])
    sizes = [2 * GIB, GIB, 100 * MIB, 3 * MIB]
    needs = HostNeeds.of(
        kind=["forked", "objects", "batch", "pinned"],
        stack_id=[0, 0, 0, 1],
        loader=[0, 0, 0, -1],
        count=[2, 1, 1, 2],
        batches=[0, 0, 6, 0],
        requested_bytes=sizes,
        size_bytes=[*sizes[:3], 4 * MIB],
    )
    frames = ["/job/train.py:9:<module>", "/job/train.py:4:<module>"]
    stacks = Stacks.of(stack_id=[0, 1], frames=frames, fx_nodes=["", ""])
    tables: dict[type[Table], Table] = {HostMemory: samples, HostLimits: limits, HostNeeds: needs, Stacks: stacks}
    machine = Machine(device_kind="cuda", device_name=device_name)
    return Trace.of([(Manifest(machine=machine, backend=Backend(name=backend)), tables)], Path("run.memprof"))


def test_a_plans_copies_get_what_the_job_leaves_of_the_host() -> None:
    """By default what was free when least was; of a budget what the job does not take; any on another host."""
    request = SearchRequest(GIB)
    found = with_host(request, trace(), None, targets_device=True)
    assert found.most_host_bytes == 2 * GIB
    given = replace(request, host=HostBudget(7 * GIB, 3 * GIB), most_host_bytes=3 * GIB)
    assert with_host(given, trace(), None, targets_device=True).most_host_bytes == GIB
    assert with_host(request, trace(), find_machine("a100-80gb"), targets_device=True) is request


def test_a_job_that_would_be_killed_itself_leaves_nothing() -> None:
    """No plan fits then, and the sentence says where to set fewer workers, and how many."""
    found = with_host(SearchRequest(GIB, host=HostBudget(5 * GIB)), trace(), None, targets_device=True)
    assert found.most_host_bytes == -GIB
    said = list(describe_host(found, trace()))
    assert said[0].endswith("1.00 GiB more than host=5.00 GiB: it would be killed.")
    assert said[1].startswith("In the DataLoader at train.py:9, num_workers=1 instead of 2 frees 2.")


def test_where_memory_is_unified_the_job_counts_against_the_one_budget() -> None:
    """On a device that has the host's memory, and where the budget says so."""
    found = with_host(SearchRequest(10 * GIB), trace("NVIDIA GB10"), None, targets_device=True)
    assert (found.is_unified, found.budget_bytes) == (True, 4 * GIB)
    with pytest.raises(UsageError, match="one size"):
        with_host(SearchRequest(GIB, host=HostBudget(GIB)), trace("NVIDIA GB10"), None, targets_device=True)
    with pytest.raises(UsageError, match=r"6\.00 GiB of host memory"):
        with_host(SearchRequest(GIB, is_unified=True), trace(), None, targets_device=True)


def test_a_dry_run_forecasts_the_host_as_intervals() -> None:
    """Workers up to copies of all Python objects, batches up to those in flight, pinned memory to the byte."""
    one = trace(backend=DRY_RUN)
    forecast = HostForecast.of(one, HostUse.of(one))
    assert forecast is not None
    parts = {part.name: (part.least_bytes, part.most_bytes) for part in forecast.parts}
    assert parts["pinned (train.py:4)"] == (8 * MIB, 8 * MIB)
    assert parts["shared batches (train.py:9)"] == (200 * MIB, 600 * MIB)
    least, most = parts["2 workers (train.py:9)"]
    assert least < 4 * GIB < most == 2 * (3 * GIB + 200 * MIB)
    assert forecast.margin_bytes is not None
    assert forecast.margin_bytes < 0
    assert "In the DataLoader at train.py:9, num_workers=" in next(forecast.warnings())


def test_advice_names_numbers_that_fit() -> None:
    """Fewer batches in flight where shared memory is short; fewer workers where even one each is too much."""
    one = Loader("train.py:9", workers=4, in_flight=18, batch_bytes=MIB, worker_bytes=64 * MIB)
    assert "prefetch_factor=2 instead of 4" in describe_smaller_prefetch([one], 12 * MIB)
    assert "num_workers=1 instead of 4" in describe_smaller_prefetch([one], 3 * MIB)
    assert "num_workers=0, or smaller" in describe_smaller_prefetch([one], MIB)
    assert "num_workers=2 instead of 4" in describe_fewer_workers([one], 130 * MIB)


def test_a_data_set_is_divided_into_objects_and_arrays(tmp_path: Path) -> None:
    """Numbers in lists are objects; what views of one array show counts once; mapped files are apart."""
    import numpy as np

    numbers = data_sizes([[float(number) for number in range(50_000)]])
    assert numbers["objects"] == pytest.approx(50_000 * 32, rel=0.01)
    assert numbers["arrays"] == pytest.approx(50_000 * 8, rel=0.2)
    array = np.zeros((1000, 1000))
    assert data_sizes([list(array)])["arrays"] == pytest.approx(array.nbytes, rel=0.01)
    np.save(tmp_path / "data.npy", array)
    assert data_sizes([np.load(tmp_path / "data.npy", mmap_mode="r")])["mapped"] == array.nbytes
    gone = weakref.proxy(lambda: None)  # of which isinstance would raise a ReferenceError
    assert set(data_sizes([gone])) == {"objects"}
