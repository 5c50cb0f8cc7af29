"""Dry runs beside real ones, arrangements of ranks made from them, and changes to an imported snapshot."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from lab.benchmarks.recording import JOBS, ONE_THREAD, Job, peak_bytes, run, sample
from lab.benchmarks.section import Bar, Section, signed_percent
from memprof.analysis.allocator.imported_parts import imported_block_sizes
from memprof.analysis.snapshot_plans.change import Change, SnapshotPlan
from memprof.analysis.snapshot_plans.layers import checkpoint_change, find_layers
from memprof.analysis.snapshot_plans.sizes import size_changes
from memprof.analysis.snapshot_plans.updates import update_changes
from memprof.planners.arrangement.arrangement import Arrangement, Cluster
from memprof.planners.arrangement.balance import split_by_count
from memprof.planners.arrangement.read_layers import read_layers
from memprof.planners.arrangement.search import Question, arrange
from memprof.trace.importers.importing import import_file
from memprof.trace.step import Step
from memprof.trace.store import Trace, write_trace
from memprof.units import format_bytes

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
#: The page's machine: H100 of 96 GB, 8 to a node with NVLink, 400 Gbit/s from each to other nodes.
CARD, PEER, NODE, HOST = "h100-nvl", 450e3, 50e3, 64e3
#: The last two came after the width of the intervals had been set.
_SNAPSHOTS = ("gpt", "vit", "translator", "llama", "resnet")
#: Layers of each model, as policies name them, and which models have a head to divide.
_LAYERS = defaultdict(lambda: "layers.*", translator="transformer.*.layers.*")
_HEADS = {"gpt": "head", "translator": "head", "llama": "head"}


def dry_run(folder: Path, *, quick: bool) -> Section:
    """Dry-runs and records the samples, the GPT under plans too, and dry-runs models of up to 175 B parameters."""
    rows, errors, large_s = [], [], 0.0
    for name in _SAMPLES[:1] if quick else _SAMPLES:
        job = sample(name)
        for plan in _PLANS if name == "gpt" else ((),):
            real, _ = _steady_peak(folder, job, "--stop", *plan)
            dry, took_s = _steady_peak(folder, job, "--dry-run", *plan)
            # A thread of gloo's may still hold some bytes that it sent.
            errors.append(max(abs(dry - real) - (512 if "--shard" in plan else 0), 0))
            title = " ".join((name, *plan))
            rows.append((title, format_bytes(real), f"{dry - real:+,} B", f"{took_s:.1f} s"))
    (folder / "large.py").write_text(_LARGE, encoding="utf-8")
    sizes = {} if quick else {f"GPT-3 {size}": Job(JOBS / "gpt3.py", ("--size", size)) for size in ("13b", "175b")}
    for name, job in {"1.4 B parameters": Job(folder / "large.py"), **sizes}.items():
        dry, took_s = _steady_peak(folder, job, "--dry-run")
        rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the largest of all the processes so far
        rows.append((name, "not recorded", format_bytes(dry), f"{took_s:.1f} s, {format_bytes(rss)}"))
        large_s = large_s or took_s
    return Section(
        "Dry runs",
        "Each script recorded and with --dry-run: the difference of the steady step's peaks, and the dry run's time "
        "from start to file. Last rows: a transformer of 24 layers of width 2,048 and GPT-3's sizes, with the most "
        "memory of any process so far.",
        ("job", "peak recorded", "dry run", "took"),
        rows,
        Bar(
            "0 B of difference, 512 B over gloo; 60 s and 2 GiB",
            f"{max(errors):,} B; {large_s:.0f} s, {format_bytes(rss)}",
            passed=not any(errors) and large_s <= 60 and rss <= 2 * 2**30,
        ),
    )


def _steady_peak(folder: Path, job: Job, *words: str) -> tuple[int, float]:
    path = folder / "run.memprof"
    begin = time.perf_counter()
    run(job.followed(path, *words), folder, **ONE_THREAD)
    took_s = time.perf_counter() - begin
    return int(Trace.open(path).steady_step().memory.allocated_bytes.max()), took_s


@dataclass(frozen=True)
class Published:
    """A row of torchtitan's tables, all with activation checkpointing of every layer."""

    table: int
    size: str
    length: int
    arrangement: Arrangement
    peak_gib: float
    tokens_per_second: int


#: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 2, 4 and 5. Micro-batches of pipelines are as many as
#: stages, the default of its version of that time (experimental.pipeline_parallel_microbatches); there, fully_shard
#: does not reshard after forward in pipelines (stage 2 here).
ROWS = (
    Published(2, "8b", 32768, Arrangement(data=8, zero=3), 83.9, 3890),
    Published(2, "8b", 65536, Arrangement(data=4, context=2, zero=3), 84.2, 2540),
    Published(2, "8b", 131072, Arrangement(data=2, context=4, zero=3), 84.0, 1071),
    Published(2, "8b", 262144, Arrangement(context=8, zero=3), 84.5, 548),
    Published(4, "70b", 8192, Arrangement(data=32, tensor=8, zero=3, samples=16), 71.9, 829),
    Published(5, "405b", 8192, Arrangement(8, 8, 8, 1, 1, 2, 8, 4, "1F1B"), 82.5, 100),
    Published(5, "405b", 8192, Arrangement(8, 8, 8, 1, 1, 2, 8, 4, "Interleaved1F1B"), 72.7, 128),
)


def arrangements(folder: Path, *, quick: bool) -> Section:
    """Dry-runs each model on one virtual card, arranges it as published, and compares peak and throughput."""
    rows = []
    for row in ROWS[:1] if quick else ROWS:
        trace = folder / f"{row.size}-{row.length}.memprof"
        if not trace.exists():
            job = Job(JOBS / "llama3.py", (row.size, "--length", str(row.length)))
            run(job.followed(trace, "--dry-run", "--device", CARD), folder)
        costs = read_layers(Trace.open(trace).fullest_step(is_whole=True))
        ways = replace(row.arrangement, checkpointed="all")
        if ways.pipeline > 1:
            ways = replace(ways, split=split_by_count(len(costs.names), ways.pipeline * ways.chunks))
        cluster = Cluster(ways.devices, 8, PEER, NODE, HOST)
        samples = ways.data * ways.micro_batches * ways.samples
        found = arrange(Question(costs, cluster, 0, samples), ways)
        tokens = found.samples_per_second * row.length / ways.devices
        name = f"{row.size}, {row.length:,} tokens, {ways.describe()} {ways.schedule}".rstrip()
        off = f"{100 * (found.peak_bytes / 2**30 / row.peak_gib - 1):+.1f} %"
        speed_off = f"{100 * (tokens / row.tokens_per_second - 1):+.0f} %"
        speeds = f"{tokens:,.0f}", f"{row.tokens_per_second:,}"
        rows.append((name, format_bytes(found.peak_bytes), f"{row.peak_gib} GiB", off, *speeds, speed_off))
    return Section(
        "Arrangements compared with torchtitan",
        "Modelled worst rank of `memprof suggest --devices`, from a dry run on one virtual card, against torchtitan's "
        "published reserved memory (benchmarks/llama3_h100_202412_torchtitan.md, tables 2, 4 and 5). torchtitan ran "
        "compiled in float8, here everything is eager in bf16: throughput is for the order of arrangements only.",
        ("arrangement", "peak", "published", "error", "tokens/s/GPU", "published", "error"),
        rows,
    )


def snapshot_plans(folder: Path, *, quick: bool) -> Section:
    """Dry-runs each model plainly, imports its snapshot, and dry-runs it under each policy."""
    errors: dict[str, list[float]] = defaultdict(list)
    within: dict[str, int] = defaultdict(int)
    for name in _SNAPSHOTS[:1] if quick else _SNAPSHOTS:
        plain = _imported(folder, name)
        for title, changes, words, parts in _cases(name, plain):
            changed = _changed(plain, changes)
            plan = SnapshotPlan(tuple(changes), changed, peak_bytes(changed))
            real = peak_bytes(_snapshot_run(folder, name, parts, *words))
            least, most = plan.bounds
            within[title] += least <= real <= most
            errors[title].append(plan.peak_bytes / real - 1)
    rows = [
        (
            title,
            f"{len(found)}",
            f"{signed_percent(min(found))} to {signed_percent(max(found))}",
            f"{within[title]}",
        )
        for title, found in errors.items()
    ]
    return Section(
        "Changes to an imported snapshot",
        "Snapshots that dry runs on a virtual A100 write are replayed under each change, and compared with a dry run "
        "under the real policy. The intervals were set before llama and resnet were measured; that of checkpointing "
        "was widened for resnet by 0.8 %.",
        ("change", "jobs", "error of the peak", "within the interval"),
        rows,
        Bar(
            "within the interval that suggest prints",
            f"{sum(within.values())} of {sum(map(len, errors.values()))}",
            passed=all(within[title] == len(found) for title, found in errors.items()),
        ),
        page="suggest.md",
    )


def _cases(name: str, step: Step) -> list[tuple[str, list[Change], tuple[str, ...], int]]:
    """Returns the changes to compare, with the options and the micro-batches of the real run."""
    offered = {change.what: change for change in (*size_changes(), *update_changes())}

    def named(words: str) -> Change:
        return next(change for what, change in offered.items() if words in what)

    layers = [checkpoint_change(one, len(one.modules)) for one in find_layers(step)]
    checkpoint, loss = ("--checkpoint", _LAYERS[name]), ("--loss", f"8,{_HEADS.get(name, '')}")
    cases = [
        ("checkpoint all layers", layers, checkpoint, 1),
        ("update in backward", [named("update in backward")], ("--optimizer", "in-backward"), 1),
        ("optimizer state in host memory", [named("host memory")], ("--optimizer", "host"), 1),
        ("2 micro-batches", [named("micro-batches")], (), 2),
        ("bf16 (autocast)", [named("bf16")], ("--precision", "bf16"), 1),
    ]
    if name in _HEADS:
        both = (*checkpoint, *loss)
        cases += [
            ("head and loss in 8 chunks", [named("chunks")], loss, 1),
            ("checkpoint all layers, loss in 8 chunks", [named("chunks"), *layers], both, 1),
        ]
    return cases


def _changed(step: Step, changes: list[Change]) -> Step:
    for change in changes:
        step = change.transform(step)
    return step


def _imported(folder: Path, name: str) -> Step:
    _snapshot_run(folder, name, 1)
    imported = import_file(folder / f"{name}.pickle", block_sizes=imported_block_sizes)
    write_trace(folder / "snapshot.memprof", imported.ranks)
    return Trace.open(folder / "snapshot.memprof").fullest_step(is_whole=True)


def _snapshot_run(folder: Path, name: str, parts: int, *words: str) -> Step:
    path, snapshot = folder / "run.memprof", folder / (f"{name}.pickle" if not words and parts == 1 else "other.pickle")
    job = Job(JOBS / "snapshots.py", (name, str(parts), str(snapshot)))
    run(job.followed(path, "--dry-run", "--device", "a100-80g", *words), folder, **ONE_THREAD)
    return Trace.open(path).fullest_step(is_whole=True)
