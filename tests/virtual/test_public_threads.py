"""Jobs that public threads ask about, rebuilt small: the command's answer is the right one, to the byte.

Each script says which thread; what is right follows from its shapes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.diff.comparison import compare, open_side
from memprof.analysis.report.report import build_report
from memprof.cli.main import main
from tests.recorder.recorded import Ended, record_script

pytestmark = pytest.mark.slow

MIB = 1 << 20

#: torchtitan#4153: full recompute that keeps some products; what does each of them cost?
KEPT_PRODUCTS = """
import sys
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = []


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wq, self.wo = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.wq(self.norm(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def policy(ctx, op, *args, **kwargs):
    is_wo = op is torch.ops.aten.addmm.default and args[2].shape == (512, 512)
    return CheckpointPolicy.MUST_SAVE if is_wo and sys.argv[1] == "wo" else CheckpointPolicy.PREFER_RECOMPUTE


layers = nn.ModuleList(Layer(512) for _ in range(6)).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
    x.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: Megatron-LM#1913: activations are offloaded by module, not by layer; which modules hold the most?
EXPERTS = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width, hidden, count):
        super().__init__()
        self.fc1 = nn.ModuleList(nn.Linear(width, hidden) for _ in range(count))
        self.act = nn.ModuleList(nn.GELU() for _ in range(count))
        self.fc2 = nn.ModuleList(nn.Linear(hidden, width) for _ in range(count))

    def forward(self, x):
        parts = x.chunk(len(self.fc1))
        return torch.cat([b(a(f(p))) for f, a, b, p in zip(self.fc1, self.act, self.fc2, parts)])


class Layer(nn.Module):
    def __init__(self, width, hidden, count):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe_norm, self.moe = nn.LayerNorm(width), Experts(width, hidden, count)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.moe_norm(x).flatten(0, 1)).view_as(x)


model = nn.Sequential(*(Layer(512, 4096, 4) for _ in range(4))).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(4, 1024, 512, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: verl#630: memory of the host grows with every step, since rollouts stay in a list.
ROLLOUTS = """
import torch
from torch import nn

model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history, tables = [], []


def rollout():
    prompts = torch.randint(0, 1000, (64, 2048))
    history.append({"prompts": prompts, "responses": prompts.clone(), "scores": torch.rand(64)})
    tables.append(["response " * 300 for _ in range(64)])


for step in range(12):
    rollout()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: geti#7373: a DataLoader's worker dies of a bus error where /dev/shm has 64 MB.
IMAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.zeros(3, 640, 640), 0


if __name__ == "__main__":
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in DataLoader(Images(), batch_size=16, num_workers=4):
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

#: accelerate#3844: FSDP2 with LoRA takes more than FSDP, since frozen weights are cast to fp32, too.
ADAPTERS = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Adapted(nn.Module):
    def __init__(self, width, rank=8):
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return torch.relu(self.base(x) + self.up(self.down(x)))


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = nn.Sequential(*(Adapted(1024) for _ in range(8))).to("cuda", torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for name, parameter in model.named_parameters():
    if parameter.requires_grad or sys.argv[1] == "all":
        parameter.data = parameter.data.float()
for layer in model:
    for part in (layer.base, layer.down, layer.up):
        fully_shard(part, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(3):
    model(torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def dry_run(folder: Path, script: str, word: str = "", *options: str) -> Ended:
    """Dry-runs a script on an H200, with an argument."""
    name = f"{word or 'run'}.memprof"
    return record_script(folder, script, "--dry-run", "--device", "h200", *options, words=(word,), name=name)


def test_the_cost_of_a_product_kept_from_recomputation(tmp_path: Path) -> None:
    """Six outputs of 8 MiB: all at the end of forward, five at the peak, where the last layer has its own anyway."""
    full, kept = (dry_run(tmp_path, KEPT_PRODUCTS, word) for word in ("full", "wo"))
    found = compare([open_side(full.path)], [open_side(kept.path)])
    assert found.peak.bytes == 5 * 8 * MIB
    assert {pair.name: pair.bytes for pair in found.phases}["forward"] == 6 * 8 * MIB
    changed = {part.name: part.bytes for part in found.peak.parts["module"] if part.bytes}
    assert changed == {f"{layer}.wo": 8 * MIB for layer in range(5)}


def test_the_modules_that_hold_most_for_backward(tmp_path: Path) -> None:
    """4,096 tokens of 4,096 numbers in bf16: the activation function and the second product save 32 MiB each."""
    report = build_report(dry_run(tmp_path, EXPERTS).trace)
    saved = report.saved_summary.by_module
    names = {report.tree.names[part.key]: part.bytes for part in saved.parts if part.key is not None}
    for layer in range(4):
        for part, size in (("act", 32 * MIB), ("fc2", 32 * MIB), ("fc1", 4 * MIB)):
            assert sum(names.get(f"{layer}.moe.{part}.{expert}", 0) for expert in range(4)) == size


def test_a_list_of_rollouts_is_named_with_its_growth(tmp_path: Path) -> None:
    """Two tensors of 64 x 2,048 numbers of 8 bytes stay in each step."""
    ended = record_script(tmp_path, ROLLOUTS)
    assert "Memory grows by 2.00 MiB a step" in ended.stderr
    assert "`history[2]['" in ended.stderr


def test_shared_memory_of_loader_workers_is_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of 16 x 3 x 640 x 640 numbers take 75 MiB each: one for each of four workers, up to ten in flight."""
    assert main(["report", str(dry_run(tmp_path, IMAGES).path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shared batches")]
    assert "300.0" in row
    assert "750.0" in row
    assert "10 batches of 75.00 MiB in flight" in row


def test_frozen_weights_in_fp32_are_the_difference(tmp_path: Path) -> None:
    """Of 8 x 1,024 x 1,024 frozen numbers each of two ranks holds half, with 2 bytes more where they are cast."""
    own, cast = (dry_run(tmp_path, ADAPTERS, word, "--ranks", "2") for word in ("own", "all"))
    found = compare([open_side(own.path)], [open_side(cast.path)])
    changed = {part.name: part.bytes for part in found.peak.parts["category"]}
    assert changed["parameter"] == 8 * 1024 * 1024 // 2 * 2
