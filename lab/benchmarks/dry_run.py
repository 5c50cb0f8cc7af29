"""How close is a dry run to a real one, and how much time and memory does a large model take?"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from lab.benchmarks.section import Section, verdict
from memprof.trace.store import Trace
from memprof.units import format_bytes

_ROOT = Path(__file__).resolve().parents[2]
_SAMPLES = ("gpt", "resnet", "lstm")
_PLANS = (
    (),
    ("--checkpoint", "layers.*"),
    ("--precision", "bf16"),
    ("--optimizer", "in-backward"),
    ("--loss", "4,head"),
    ("--compress", "layers.*"),
    ("--swap", "layers.*:disk"),
    ("--swap", "optimizer:disk"),
    ("--shard", "ddp:2"),
    ("--shard", "zero1:2"),
    ("--shard", "fsdp:2"),
)
_GPT3 = str(Path(__file__).parent / "jobs" / "gpt3.py")
_SIZES = ("13b", "175b")
_LARGE = """
import torch
from torch import nn
layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(50257, 2048), nn.TransformerEncoder(layer, 24), nn.Linear(2048, 50257, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    ids = torch.randint(50257, (4, 1024))
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def measure(folder: Path, *, quick: bool) -> Section:
    """Dry-runs and records the samples, the GPT under plans too, and dry-runs models of up to 175 B parameters."""
    rows, errors = [], []
    for sample in _SAMPLES[:1] if quick else _SAMPLES:
        script = str(_ROOT / "sample_traces" / sample / "train.py")
        for plan in _PLANS if sample == "gpt" else ((),):
            real, _ = _peak(folder, "--stop", *plan, script)
            dry, took_s = _peak(folder, "--dry-run", *plan, script)
            # A thread of gloo's may still hold some bytes that it sent.
            errors.append(max(abs(dry - real) - (512 if "--shard" in plan else 0), 0))
            title = " ".join((sample, *plan))
            rows.append((title, format_bytes(real), f"{dry - real:+,} B", f"{took_s:.1f} s"))
    (folder / "large.py").write_text(_LARGE, encoding="utf-8")
    dry, took_s = _peak(folder, "--dry-run", str(folder / "large.py"))
    rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the largest of all the processes above
    rows.append(("1.4 B parameters", "not recorded", format_bytes(dry), f"{took_s:.1f} s, {format_bytes(rss)}"))
    for size in () if quick else _SIZES:
        dry, size_s = _peak(folder, "--dry-run", _GPT3, "--size", size)
        rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        rows.append((f"GPT-3 {size}", "not recorded", format_bytes(dry), f"{size_s:.1f} s, {format_bytes(rss)}"))
    return Section(
        "Dry runs",
        "Each script once recorded and once with --dry-run, on one thread: the difference of the steady step's peaks, "
        "and the time and memory of the dry run from start to file. The last rows are a transformer of 24 layers of "
        "width "
        "2,048 and models of GPT-3's sizes: their peaks, and the most memory of any process up to that row.",
        ("job", "peak recorded", "dry run", "took"),
        tuple(rows),
        verdict(
            "0 B of difference, 512 B over gloo; 60 s and 2 GiB",
            passed=not any(errors) and took_s <= 60 and rss <= 2 * 2**30,
        ),
    )


def _peak(folder: Path, *words: str) -> tuple[int, float]:
    path = folder / "run.memprof"
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", "record", "-f", "-q", "-o", str(path), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    took_s = time.perf_counter() - begin
    return int(Trace.open(path).steady_step().memory.allocated_bytes.max()), took_s
