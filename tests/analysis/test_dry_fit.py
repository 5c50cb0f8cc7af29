"""Whether a job fits a simulated device: the interval outside torch's allocator, and the sentence."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.analysis.allocator.device_verdict import DryFit, dry_fit, judge_device
from memprof.analysis.allocator.uncertainty import beyond_tensors
from memprof.cli.main import main
from memprof.machines.catalogue import CONTEXT_BYTES, find_machine
from memprof.machines.outside import LAZY, NCCL
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
