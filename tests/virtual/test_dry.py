"""A dry run has the operators, the storages and the peak of a real run, and computes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memprof.trace.schema import Memory
from memprof.trace.step import Step
from memprof.virtual.values.answers import Answers
from tests.recorder.recorded import Ended, record, record_both, record_script

_SAMPLES = Path(__file__).parents[2] / "sample_traces"
_GPT = ("--layers", "2", "--width", "32", "--batch-size", "4", "--length", "32", "--steps", "6")


def _dry_run(folder: Path, script: str, *options: str) -> Ended:
    return record_script(folder, script, "--dry-run", *options)


def _names(step: Step) -> list[str]:
    return [name for name, kind in zip(step.ops.name, step.ops.kind, strict=True) if kind != "allocation"]


@pytest.mark.parametrize(
    ("sample", "arguments"),
    [
        pytest.param("gpt", _GPT, id="gpt"),
        pytest.param("resnet", ("--steps", "6"), id="resnet", marks=pytest.mark.slow),
        pytest.param("lstm", ("--steps", "6"), id="lstm", marks=pytest.mark.slow),
    ],
)
def test_operators_and_peak_are_those_of_a_real_run_to_the_byte(
    tmp_path: Path, sample: str, arguments: tuple[str, ...]
) -> None:
    """Every operator of a step is there in its order, and the peak is the real one, workspaces of kernels included."""
    script = str(_SAMPLES / sample / "train.py")
    real = record(tmp_path, "--stop", script, *arguments, name="real.memprof")
    dry = record(tmp_path, "--dry-run", script, *arguments, name="dry.memprof")
    assert _names(dry.step) == _names(real.step)
    assert dry.peak == real.peak


def test_a_plan_is_dry_run_as_it_is_applied(tmp_path: Path) -> None:
    """Under a plan, too, the peak of the dry run is that of the real run, to the byte."""
    words = ("--checkpoint", "layers.*", str(_SAMPLES / "gpt" / "train.py"), *_GPT)
    real = record(tmp_path, "--stop", *words, name="real.memprof")
    dry = record(tmp_path, "--dry-run", *words, name="dry.memprof")
    assert dry.step.ops.is_recompute.any()
    assert dry.peak == real.peak


_MIXED = """
import torch
from torch import nn
torch.manual_seed(0)
shorten, model = nn.Linear(64, 64), nn.Linear(64, 8)
optimizer = torch.optim.SGD([*shorten.parameters(), *model.parameters()], lr=0.1)
for step in range(6):
    x = torch.randn(2048, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        branch = shorten(x)
    residual = x + branch
    residual *= branch
    model(residual).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_sum_of_two_types_copies_one_of_them(tmp_path: Path) -> None:
    """The kernel converts the branch in bfloat16 to float32 within the sum, which is the fullest moment."""
    real, dry = record_both(tmp_path, _MIXED)
    copied = 2048 * 64 * 4
    for ended in (real, dry):
        sums = np.isin(ended.step.ops.name, ("aten.add.Tensor", "aten.mul_.Tensor"))
        assert ended.step.ops.workspace_bytes[sums & (ended.step.ops.phase == "forward")].tolist() == [copied, copied]
    assert dry.peak == real.peak


_SUMMED = """
import numpy as np
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(np.ones((64, 4096), dtype=np.int32), batch_size=64)
for step in range(6):
    masks = MASKS
    lengths = masks.sum(-1)
    (model(torch.randn(64, 8)).sum(-1) / lengths).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("masks", ["torch.ones(64, 4096, dtype=torch.int32)", "next(iter(batches))"])
def test_a_sum_of_a_mask_copies_it(tmp_path: Path, masks: str) -> None:
    """The kernel converts a mask of int32 to the type of the sum, int64, with values (a loader's batch) or without."""
    real, dry = record_both(tmp_path, _SUMMED.replace("MASKS", masks))
    for ended in (real, dry):
        assert ended.step.ops.workspace_bytes.max() == 64 * 4096 * 8
    assert dry.peak == real.peak


_EXPERTS = """
import torch
from torch import nn
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 64))
    def forward(self, x):
        ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
        return torch._grouped_mm(x, self.weight, offs=ends)
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(64, 32)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no product of groups")
def test_an_operator_whose_rule_refuses_what_the_processor_takes(tmp_path: Path) -> None:
    """Its kernel is run on zeros, and what that returns has its shape: a mixture of experts in float32."""
    real, dry = record_both(tmp_path, _EXPERTS)
    assert _names(dry.step) == _names(real.step)
    assert dry.peak == real.peak


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no product of groups")
def test_experts_in_float32_run_on_a_device_too(tmp_path: Path) -> None:
    """With the gradients of the processor's run, and rows that are padded to 16 bytes."""
    script = _EXPERTS.replace("Experts()\n", "Experts().cuda()\n").replace(
        "dtype=torch.int32)", 'dtype=torch.int32, device="cuda")'
    )
    script = script.replace("torch.randn(64, 32)", 'torch.randn(64, 32, device="cuda")').replace(
        "4, 32, 64", "4, 32, 63"
    )
    ended = record_script(tmp_path, script, "--dry-run", "--device", "h100-80g")
    made = ended.step.storages
    sizes = made.requested_bytes[made.shape == "64x63"]
    assert len(sizes)
    assert sizes.max() == 4 * (63 * 64 + 63)


_DATASET = """
import torch
images = torch.zeros(512, 64)
foreign = torch.from_numpy(torch.zeros(4096).clone().numpy())
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.from_numpy(images[i].numpy().copy())
model = torch.nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Rows(), batch_size=8):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_data_set_that_numpy_shares_is_counted(tmp_path: Path) -> None:
    """Tensors whose memory numpy shares belong to torch's allocator as before: 512 x 64 numbers of 4 bytes."""
    window = ("--skip", "1", "--steps", "2")
    real = record_script(tmp_path, _DATASET, *window, name="real.memprof")
    dry = record_script(tmp_path, _DATASET, "--dry-run", *window, name="dry.memprof")
    assert dry.peak == real.peak > 512 * 64 * 4


_COPIED = """
import copy
import torch
shell = torch.nn.Linear(1000, 1000, device="meta")
model = torch.nn.Linear(64, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    output = model(torch.randn(8, 64))
    best = copy.deepcopy(output.detach())
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_copies_and_tensors_without_memory_leave_the_device_as_it_is(tmp_path: Path) -> None:
    """torch copies a storage through a tensor on meta, which is no memory, like the job's own; nor is a copy left out.

    The copies are that of the output, and that of its gradient, expanded from one number, which BLAS cannot read.
    """
    window = ("--skip", "1", "--steps", "2")
    real = record_script(tmp_path, _COPIED, *window, name="real.memprof")
    dry = record_script(tmp_path, _COPIED, "--dry-run", *window, name="dry.memprof")
    assert dry.trace.manifest.machine.device_kind == real.trace.manifest.machine.device_kind == "cpu"
    assert dry.peak == real.peak > 64 * 512 * 4 + 2 * 8 * 512 * 4


_LARGE = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384, bias=False) for _ in range(32)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(1000):
    model(torch.randn(1, 16384)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_larger_than_the_machine_takes_hardly_any_memory(tmp_path: Path) -> None:
    """32 GiB of weights and as much of gradients are predicted exactly, by a process that never holds two of them."""
    ended = _dry_run(tmp_path, _LARGE)
    step = ended.step
    weights = step.storages.allocated_bytes[step.storages.category == "parameter"].tolist()
    assert weights == [2**30] * 32
    assert 64 * 2**30 <= ended.peak < 64 * 2**30 + 2**23  # 32 activations of 64 KiB, and their gradients
    assert ended.trace.table(Memory).host_rss_bytes.max() < 2 * 2**30


_ASKING = """
import copy, io, math
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.arange(3 + i % 5), i % 2

def collate(rows):
    lengths = torch.tensor([len(ids) for ids, _ in rows])
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, lengths, torch.tensor([label for _, label in rows])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(16, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)
        nn.init.trunc_normal_(self.embed.weight)
    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        assert hidden.shape[1] == int(lengths.max()) == ids.shape[1], (hidden.shape, lengths, ids.shape)
        return self.head(hidden.mean(1))

model = Model().to("cpu")
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
scaler = torch.amp.GradScaler("cpu")
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
model.load_state_dict(torch.load(buffer))
best = math.inf
for ids, lengths, labels in DataLoader(Lines(), batch_size=8, collate_fn=collate, num_workers=WORKERS):
    assert ids.shape[1] == int(lengths.max()) > 3
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(ids, lengths), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    with torch.no_grad():
        for mean, new in zip(average.parameters(), model.parameters()):
            mean.lerp_(new, 0.1)
    if torch.isnan(loss) or not torch.isfinite(loss).all():
        raise SystemExit("it diverged")
    print(f"{loss:.3f} {loss.item():.3f} {math.log(float(norm))}")
    print(loss.detach().numpy() + 1, average.head.bias.tolist())
    print(loss, lengths)
    if loss < best:
        best = loss.item()
        torch.save(model.state_dict(), "best.pt")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_that_asks_for_values_goes_on_and_is_told_of_it(tmp_path: Path, workers: int) -> None:
    """Logging, clipping, scaling, averages, checkpoints and packed sequences work; batches are as long as real ones.

    The notes name the lines that read values, and state that nothing was saved.
    """
    ended = _dry_run(tmp_path, _ASKING.replace("WORKERS", str(workers)))
    assert ended.returncode == 0, ended.stderr
    assert "values printed by the job are placeholders" in ended.stderr
    assert "1.000 1.000" in ended.stdout
    assert not (tmp_path / "best.pt").exists()
    manifest = ended.trace.manifest
    assert manifest.backend.name == "dry-run"
    line = 1 + next(i for i, text in enumerate(_ASKING.splitlines()) if "loss.item():.3f" in text)
    notes = " ".join(manifest.notes)
    assert f"job.py:{line}" in notes
    assert "torch.save wrote nothing" in notes
    assert "update" not in notes
    assert (ended.step.ops.phase == "optimizer").any()


_CUSTOM = """
import torch
@torch.library.custom_op("mine::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
FAKE
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    (model(torch.randn(2, 4)).sum() + double(model.weight.detach()).sum()).backward()
    optimizer.step()
"""


def test_an_operator_that_tells_no_shape_is_named_with_the_way_to_tell_it(tmp_path: Path) -> None:
    """The job ends with status 125 and one sentence; once the operator has a fake kernel, it is dry-run."""
    refused = _dry_run(tmp_path, _CUSTOM.replace("FAKE", ""))
    assert refused.returncode == 125
    assert "mine::double cannot be dry-run" in refused.stderr
    assert '@torch.library.register_fake("mine::double")' in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not refused.path.exists()
    fake = '@torch.library.register_fake("mine::double")\ndef _(x):\n    return torch.empty_like(x)'
    assert "mine.double.default" in _names(_dry_run(tmp_path, _CUSTOM.replace("FAKE", fake)).step)


_MASKED = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    out = model(torch.randn(16, 8))
    out[out > 0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_sizes_that_depend_on_values_are_upper_bounds_and_said_to_be(tmp_path: Path) -> None:
    """A mask lets everything through: 16 x 8 positive elements of 4 bytes; the note names operator and line."""
    ended = _dry_run(tmp_path, _MASKED)
    step = ended.step
    indexed = int(np.flatnonzero(step.ops.name == "aten.index.Tensor")[0])
    made = step.storages.created_op_id == step.ops.op_id[indexed]
    assert step.storages.allocated_bytes[made].tolist() == [16 * 8 * 4]
    assert any("upper bounds" in note and "job.py:7" in note for note in ended.trace.manifest.notes)


def test_times_are_a_roofline_and_say_so(tmp_path: Path) -> None:
    """An operator takes as long as its bytes or its operations at the machine's measured speed, whichever is longer."""
    ended = _dry_run(tmp_path, _MASKED)
    step = ended.step
    manifest = ended.trace.manifest
    assert manifest.op_times.startswith("roofline")
    product = int(np.flatnonzero(step.ops.name == "aten.addmm.default")[0])
    speed = manifest.machine.speed
    # x: 16 x 8, weight: 8 x 8, bias: 8, result: 16 x 8, four bytes each; 2 x 16 x 8 x 8 operations.
    bytes_us = 4 * (128 + 64 + 8 + 128) / speed.memory_bytes_per_us
    # Recordings keep durations in steps of 2**-10 us.
    assert step.ops.duration_us[product] == pytest.approx(max(bytes_us, 2048 / speed.fp32_flops_per_us), abs=2**-10)
    known = ~np.isnan(step.ops.duration_us)
    assert step.duration_us == pytest.approx(float(step.ops.duration_us[known].sum()), rel=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--light",), "leave one out"),
        (("--remat", "1GiB"), "a dry run cannot apply remat"),
    ],
    ids=["light", "remat"],
)
def test_what_does_not_go_with_a_dry_run_is_refused_before_the_job_starts(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    """One sentence, status 125, and the job has not run."""
    ended = _dry_run(tmp_path, "open('ran', 'w')\n", *options)
    assert ended.returncode == 125
    assert sentence in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_answers_are_harmless() -> None:
    """A loss is 1, nothing is infinite, all of a condition holds and any of it does not; positions are the first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    aten = torch.ops.aten
    answers = Answers()
    with FakeTensorMode():
        loss, flag, place = torch.empty(()), torch.empty((), dtype=torch.bool), torch.empty((), dtype=torch.int64)
        assert answers.value(loss) == 1.0
        assert answers.value(flag) is False
        assert answers.value(place) == 1
        answers.mark(aten.argmax.default, (loss,), place)
        assert answers.value(place) == 0
        answers.mark(aten.all.default, (flag,), flag)
        assert answers.value(flag) is True
        inverse = torch.empty((), dtype=torch.bool)
        answers.mark(aten.logical_not.default, (flag,), inverse)
        assert answers.value(inverse) is False
    [note] = answers.notes()
    assert "were read 6 times" in note
    assert "test_dry.py" in note


@pytest.mark.parametrize("device", [(), ("--device", "rtx4090")], ids=["cpu", "cuda"])
def test_a_request_that_no_machine_serves_fails_as_in_a_real_run(tmp_path: Path, device: tuple[str, ...]) -> None:
    """A job that catches it goes on, and its recording can be read."""
    script = """
import torch
where = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(where)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    try:
        torch.empty(1 << 60, device=where)
    except RuntimeError as error:
        print(type(error).__name__, "allocate" in str(error))
    model(torch.ones(4, 8, device=where)).sum().backward()
    optimizer.step()
"""
    ended = record_script(tmp_path, script, "--dry-run", *device)
    kind = "OutOfMemoryError" if device else "RuntimeError"
    assert set(ended.stdout.splitlines()) == {f"{kind} True"}
    assert max(ended.trace.step_peaks().values()) < 2**25


@pytest.mark.parametrize("mode", ["--dry-run", "--light", "--stop"])
def test_frozen_time_does_not_stop_the_recorders_clock(tmp_path: Path, mode: str) -> None:
    """A job that replaces the clock, as frozen time does, is recorded as it would be otherwise."""
    script = """
import time
time.time_ns = time.perf_counter_ns = time.monotonic_ns = lambda: 1_000_000
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = record_script(tmp_path, script, mode).trace
    assert trace.manifest.created_us > 1e15
    assert all(peak > 4 * 64 * 64 for peak in trace.step_peaks().values())
