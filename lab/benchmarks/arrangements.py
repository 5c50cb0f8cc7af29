"""How close are modelled arrangements to what torchtitan publishes for Llama 3 on 8 to 512 GPUs?"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from lab.benchmarks.recording import environment
from lab.benchmarks.section import Section
from memprof.planners.arrangement.arrangement import Arrangement, Cluster
from memprof.planners.arrangement.balance import split_by_count
from memprof.planners.arrangement.read_layers import read_layers
from memprof.planners.arrangement.search import Question, arrange
from memprof.trace.store import Trace
from memprof.units import format_bytes

JOB = Path(__file__).parent / "jobs" / "llama3.py"
#: The page's machine: H100 of 96 GB, 8 to a node with NVLink, 400 Gbit/s from each to other nodes.
CARD, PEER, NODE, HOST = "h100-nvl", 450e3, 50e3, 64e3


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


def measure(folder: Path, *, quick: bool) -> Section:
    """Dry-runs each model on one virtual card, arranges it as published, and compares peak and throughput."""
    rows = []
    for row in ROWS[:1] if quick else ROWS:
        trace = folder / f"{row.size}-{row.length}.memprof"
        if not trace.exists():
            command = ["record", "--dry-run", "--device", CARD, "-o", str(trace), str(JOB)]
            words = [sys.executable, "-m", "memprof", *command, row.size, "--length", str(row.length)]
            subprocess.run(words, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        costs = read_layers(Trace.open(trace).fullest_step(is_whole=True))
        ways = replace(row.arrangement, checkpointed="all")
        if ways.pipeline > 1:
            ways = replace(ways, split=split_by_count(len(costs.names), ways.pipeline * ways.chunks))
        cluster = Cluster(ways.devices, 8, PEER, NODE, HOST)
        samples = ways.data * ways.micro_batches * ways.samples
        found = arrange(Question(costs, cluster, 0, samples), ways)
        tokens = found.samples_per_second * row.length / ways.devices
        rows.append(
            (
                f"{row.size}, {row.length:,} tokens, {ways.describe()} {ways.schedule}".rstrip(),
                format_bytes(found.peak_bytes),
                f"{row.peak_gib} GiB",
                f"{100 * (found.peak_bytes / 2**30 / row.peak_gib - 1):+.1f} %",
                f"{tokens:,.0f}",
                f"{row.tokens_per_second:,}",
                f"{100 * (tokens / row.tokens_per_second - 1):+.0f} %",
            )
        )
    return Section(
        "Arrangements compared with torchtitan",
        "Modelled worst rank of `memprof suggest --devices` from a dry run on one virtual card, against torchtitan's "
        "published figures (benchmarks/llama3_h100_202412_torchtitan.md, tables 2, 4 and 5: reserved memory, tokens "
        "per second and GPU). torchtitan ran with torch.compile and float8, in tables 4 and 5 with asynchronous tensor "
        "parallelism in part; here everything is eager, bf16 products at the data sheet's rate, so that throughput is "
        "for the order of arrangements only. Logits are freed before backward, as in torchtitan.",
        ("arrangement", "peak", "published", "error", "tokens/s/GPU", "published", "error"),
        tuple(rows),
    )
