"""A dry run on a simulated GPU: the job sees CUDA, and CUDA's memory is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.allocator.reserved import reserved_expandable, reserved_under
from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import suggest
from memprof.planners.search.request import SearchRequest
from memprof.trace.schema import AllocatorEvents, DeviceMemory, Memory, Segments
from tests.recorder.recorded import Ended, record_script

_CUBLAS = 8_519_680  # bytes of a handle's workspace on Ampere


_JOB = """
import json, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert torch.cuda.get_device_capability() == (8, 0), torch.cuda.get_device_capability()
early = torch.ones(300, device="cuda")  # before there is a model
assert torch.cuda.memory_allocated() == 1536, torch.cuda.memory_allocated()
del early
assert torch.cuda.memory_allocated() == 0
assert torch.cuda.memory_reserved() == 2 * 2**20

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(128), nn.Linear(128, 384), nn.Linear(128, 128)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 4, 32).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        assert x.is_cuda and x.device == torch.device("cuda:0") and x.get_device() == 0
        assert x.type().startswith("torch.cuda."), x.type()
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(64, 128), Block(), Block()
        self.head = nn.Linear(128, 64)
    def forward(self, ids):
        x = self.first(self.embed(ids))
        return self.head(checkpoint(self.second, x, use_reentrant=False))

ids = torch.randint(64, (64, 32))
data = DataLoader(TensorDataset(ids, ids), batch_size=16, pin_memory=True)
model = Net().to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
stream = torch.cuda.Stream()
for step, (inputs, targets) in enumerate(data):
    assert inputs.device.type == "cpu" and int(inputs.max()) < 64  # really loaded
    inputs, targets = inputs.cuda(non_blocking=True), targets.to("cuda:0")
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(inputs)
        assert logits.dtype is torch.bfloat16, logits.dtype
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.dtype is torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    mask = torch.zeros(16, dtype=torch.bool, device="cuda")
    mask[[0, 2]] = True
    torch.cuda.synchronize()
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda and torch.tensor([1, 2]).is_cuda
    mask.untyped_storage().data_ptr()
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
print(json.dumps({
    "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
    "free": torch.cuda.mem_get_info()[0], "total": torch.cuda.mem_get_info()[1],
}))
try:
    torch.zeros(1, device="cuda:1")
except RuntimeError as error:
    print("second:", error)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A job that uses CUDA in most of the ways that jobs do, dry-run to its end."""
    folder = tmp_path_factory.mktemp("device")
    return record_script(folder, _JOB, "--dry-run", "--device", "a100-80g", "--steps", "9")


def test_the_job_sees_a_device_and_nothing_of_the_dry_run(ended: Ended) -> None:
    """Every question of the job's is answered as on CUDA; its own counts are those of the recording."""
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[0])
    memory = ended.trace.table(Memory)
    assert told["allocated"] == memory.allocated_bytes.max()
    assert told["reserved"] == memory.reserved_bytes.max()
    assert told["free"] < told["total"] - told["reserved"]
    assert ended.stdout.splitlines()[1] == "second: CUDA error: invalid device ordinal"
    assert "Warning" not in ended.stderr


def test_the_recording_is_one_of_a_device(ended: Ended) -> None:
    """Blocks are multiples of 512 bytes, segments those of the caching allocator; the four counts stand apart."""
    trace, step = ended.trace, ended.step
    assert trace.manifest.machine.device_kind == "cuda"
    assert trace.manifest.machine.device_name == "A100 80GB"
    assert set(step.memory.device) == {"cuda:0"}
    own = step.storages.allocated_bytes[step.storages.allocated_bytes > 0]
    assert not (own % 512).any()
    assert (step.storages.requested_bytes <= step.storages.allocated_bytes).any()
    assert (step.memory.allocated_bytes <= step.memory.active_bytes).all()
    assert (step.memory.active_bytes <= step.memory.reserved_bytes).all()
    device = trace.table(DeviceMemory)
    assert (device.used_bytes > device.reserved_bytes).all()
    assert trace.table(Segments).total_size_bytes.sum() == step.memory.reserved_bytes.max()
    assert {"alloc", "free_requested", "free_completed"} <= set(trace.table(AllocatorEvents).action)


def test_operators_are_those_of_cuda(ended: Ended) -> None:
    """Attention runs in the flash kernel, dropout keeps a mask of one byte, updates are foreach ones."""
    step = ended.step
    names = set(step.ops.name)
    assert "aten._scaled_dot_product_flash_attention.default" in names
    assert "aten._scaled_dot_product_flash_attention_backward.default" in names
    assert "aten.native_dropout.default" in names
    assert any(str(name).startswith("aten._foreach_addcdiv_") for name in names)
    assert step.ops.is_recompute.any()
    assert "bool" in set(step.storages.dtype[step.storages.category == "activation"])


def test_each_thread_has_its_cublas_workspace(ended: Ended) -> None:
    """Forward's handle and backward's keep one each, of the architecture's size."""
    step = ended.step
    is_workspace = step.storages.category == "workspace"
    assert step.storages.allocated_bytes[is_workspace].tolist() == [_CUBLAS, _CUBLAS]
    assert set(step.storages.name[is_workspace]) == {"cuBLAS workspace"}


def test_gradients_and_state_lie_on_the_device(ended: Ended) -> None:
    """Weights, gradients and two moments take as much as their sizes say, rounded up block by block."""
    storages = ended.step.storages
    for category, count in (("parameter", 1), ("gradient", 2)):  # those of the step before go at its beginning
        rows = np.flatnonzero((storages.category == category) & (storages.allocated_bytes > 0))
        sizes = storages.allocated_bytes[rows].tolist()
        # Embedding 64 x 128, two blocks (norm, 384 x 128 and 128 x 128 with biases), head 64 x 128.
        wanted = [4 * 64 * 128] * 2 + [512] * 7 + [4 * 384 * 128, 1536, 4 * 128 * 128] * 2
        assert sorted(sizes) == sorted(wanted * count), category


_PLAIN = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(LARGE, LARGE, bias=False) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(4, LARGE, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_job_that_does_not_fit_is_told_so_and_why(tmp_path: Path) -> None:
    """8 matrices of 2 GiB and their gradients are 32 GiB: device, bytes, reason. A device implies the dry run."""
    ended = record_script(tmp_path, _PLAIN.replace("LARGE", "23170"), "--machine", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "Does not fit on RTX 4090" in ended.stderr
    assert "Largest category:" in ended.stderr
    assert "memprof suggest run.memprof --device 'RTX 4090'" in ended.stderr.replace(str(tmp_path) + "/", "")
    peak = int(ended.step.memory.allocated_bytes.max())
    matrix = -(-4 * 23170 * 23170 // (2 * 2**20)) * 2 * 2**20
    assert peak == pytest.approx(16 * matrix, rel=0.002)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dry-run", "--device", "a1000"), "unknown device 'a1000'; did you mean"),
        (("--dry-run", "--device", "h100"), "ambiguous device 'h100': write H100 SXM"),
        (("--dry-run", "--device", "mi300x"), "dry runs on MI300X are unsupported"),
        (("--no-dry-run", "--device", "a100-80g"), "leave out --no-dry-run"),
        (("--light", "--device", "a100-80g"), "leave one out"),
    ],
    ids=["unknown", "ambiguous", "other-maker", "real-run", "light"],
)
def test_devices_that_cannot_be_shown_are_refused_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    """Status 125, near matches are named, and the job has not run."""
    ended = record_script(tmp_path, "open('ran', 'w')\n", *words)
    assert ended.returncode == 125
    assert sentence in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_a_job_that_insists_on_cuda_is_told_how_to_be_shown_some(tmp_path: Path) -> None:
    """Without --device and without CUDA: status 125 and one sentence in place of torch's traceback."""
    ended = record_script(tmp_path, "import torch\ntorch.nn.Linear(4, 4).cuda()\n", "--dry-run")
    assert ended.returncode == 125
    assert "--device a100-80g" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_plans_whose_segments_are_above_the_budget_get_segments_that_grow(tmp_path: Path) -> None:
    """As it is the job's tensors fit and its segments do not; with segments that grow in place both do."""
    sample = str(Path(__file__).parents[2] / "sample_traces" / "gpt" / "train.py")
    words = ["train.py", "--layers", "6", "--width", "640", "--length", "256", "--batch-size", "8"]
    script = f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_path({sample!r}, run_name='__main__')\n"
    ended = record_script(tmp_path, script, "--dry-run", "--device", "l4")
    trace, step = ended.trace, ended.step
    reserved, grown = reserved_under(step, trace.manifest), reserved_expandable(step, trace.manifest)
    assert reserved is not None
    assert grown is not None
    budget = max(grown, int(step.memory.allocated_bytes.max() * 1.005))  # a prediction is an interval
    assert budget < reserved
    found = suggest(trace, basis_of(trace), SearchRequest(budget))
    assert found.plans[0].plan.describe() == "allocator expandable_segments"
    assert found.reserved[0] is not None
    assert found.reserved[0] <= budget
    kept = suggest(trace, basis_of(trace), SearchRequest(budget, forbid=("allocator",)))
    assert kept.plans[0].policies == ()


_ATTENTION = """
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

def kernel(dtype, width=64, mask=None, length=16, **options):
    q = torch.randn(2, 4, length, width, device="cuda", dtype=dtype, requires_grad=True)
    if mask is not None:
        mask = torch.ones(length, length, device="cuda", dtype=mask)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, **options).grad_fn.name()

print("half", kernel(torch.float16))
print("bf16", kernel(torch.bfloat16, is_causal=True))
print("fp32", kernel(torch.float32))
print("fp32 of 30", kernel(torch.float32, width=30))
print("masked half", kernel(torch.float16, mask=torch.bool))
with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    print("asked for", kernel(torch.float16))
with torch.autocast("cuda", torch.float16):
    print("autocast", kernel(torch.float32))
torch.nn.Linear(1, 1)
"""


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        ("v100-sxm2-16gb", ("Efficient", "math", "Efficient", "Efficient", "Efficient", "Efficient", "Efficient")),
        ("rtx3090", ("Flash", "Flash", "Efficient", "math", "Efficient", "Efficient", "Flash")),
        ("h100-80g", ("Cudnn", "Cudnn", "Efficient", "math", "Cudnn", "Efficient", "Cudnn")),
    ],
)
def test_attention_runs_in_the_kernel_that_the_card_would_choose(
    tmp_path: Path, device: str, kernels: tuple[str, ...]
) -> None:
    """By type, width, mask and compute capability, and by what the job allows; as sdp_utils.cpp of torch chooses."""
    ended = record_script(tmp_path, _ATTENTION, "--dry-run", "--device", device)
    nodes = [line.rpartition(" ")[2] for line in ended.stdout.splitlines()]
    assert len(nodes) == len(kernels), ended.stderr
    for node, kernel in zip(nodes, kernels, strict=True):
        is_fused = "ScaledDotProduct" in node
        assert (kernel in node) if kernel != "math" else not is_fused, (nodes, kernels)


_DEFERRED = """
import torch
from torch import nn
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    assert all(part.device.type == "meta" for part in torch.empty(4, 4).split(2))
assert torch.cuda.memory_allocated() == 0
model.to_empty(device="cuda")
assert model[0].weight.device == torch.device("cuda:0")
print(torch.cuda.memory_allocated())
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_made_without_memory_gets_it_on_the_device(tmp_path: Path) -> None:
    """Deferred initialization: nothing is taken on the meta device, and by `to_empty` as much as the weights are."""
    ended = record_script(tmp_path, _DEFERRED, "--dry-run", "--device", "l4")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 2 * (4 * 512 * 512 + 4 * 512)
    assert (ended.step.storages.category == "parameter").sum() == 4


_NORMED = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))
model = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_kernels_that_only_cuda_has_keep_what_they_keep_there(tmp_path: Path) -> None:
    """The parts that a build without CUDA would run are not: a norm keeps its input and a number a row, SiLU its input.

    A block keeps x, the normed x and up's result, two bytes per element, SiLU's result, and 4 bytes per row of 64.
    """
    step = record_script(tmp_path, _NORMED, "--dry-run", "--device", "a100-80g").step
    ran = set(step.ops.name[np.isin(step.ops.phase, ("forward", "backward"))])
    fused = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
    assert {f"aten.{name}.default" for name in fused} <= ran
    assert not ran & {"aten.rsqrt.default", "aten.pow.Tensor_Scalar", "aten.sigmoid.default"}
    kept = np.unique(step.saved.storage_id)
    sizes = step.storages.allocated_bytes[kept[np.isin(step.storages.category[kept], ("activation", "input"))]]
    block = [64 * 256 * 2] * 2 + [64 * 512 * 2] * 2 + [512]  # the numbers of the rows, in a block of the allocator's
    assert sorted(sizes.tolist()) == sorted(2 * block)
