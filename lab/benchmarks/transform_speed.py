"""How long does it take to predict a step of ten thousand operators?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

import memprof
from lab.benchmarks.jobs.models import Block, Decoder, mlp_of
from lab.benchmarks.section import Bar, Section, least_middle_most
from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.registry import policy_types
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: Highest time of rewriting and replaying the step, in milliseconds.
BAR_MS = 50.0
#: Blocks of the model: with so many, forward, backward and a loop over the parameters are about 10,000 operators.
BLOCKS = 44

#: The flags tried: each policy, and its forms where they are different code.
FLAGS = (
    ("shard", "fsdp:8"),
    ("precision", "bf16"),
    ("precision", "fp16"),
    ("precision", "pure-bf16"),
    ("accumulate", "4"),
    ("loss", "8"),
    ("loss", "8,head"),
    ("checkpoint", "layers.*"),
    ("swap", "layers.*:disk"),
    ("compress", "layers.*"),
    ("optimizer", "in-backward"),
    ("optimizer", "foreach"),
    ("optimizer", "loop"),
    ("compile", "layers.*"),
)

COLUMNS = ("Policy", "operators after", "transform, ms", "replay, ms", "bar")


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one policy; ``refusal`` is why it was not timed."""

    flag: str
    transform_ms: float
    replay_ms: float
    ops: int
    refusal: str = ""

    @property
    def passed(self) -> bool:
        """Whether the two together are within the bar."""
        return self.transform_ms + self.replay_ms <= BAR_MS


def record_deep(folder: Path, blocks: int = BLOCKS) -> Step:
    """Records a step of about 10,000 operators."""
    torch.manual_seed(0)
    model = Decoder(2048, 16, [Block(16, 2, mlp=mlp_of(16, 2)) for _ in range(blocks)], has_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batches = torch.utils.data.DataLoader(torch.randint(2048, (32, 33)), batch_size=8)
    path = folder / "deep.memprof"
    with memprof.record(path, skip=1, steps=2):
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
    step = Trace.open(path).steady_step()
    return step


def time_policies(step: Step, *, repeats: int) -> Iterator[Timing]:
    """Times every policy on a step."""
    kinds: dict[str, type[Policy]] = {kind.name: kind for kind in policy_types()}
    for name, value in FLAGS:
        if name not in kinds:
            continue
        flag = f"--{name} {value}"
        policy = kinds[name].from_flag(value)
        try:
            rewritten = policy.transform(step)  # the first time imports what it needs
        except PolicyError as error:
            yield Timing(flag, 0.0, 0.0, 0, str(error))
            continue
        transform = _median_ms(lambda policy=policy: policy.transform(step), repeats)  # type: ignore[misc]
        replay = _median_ms(lambda rewritten=rewritten: live_bytes(rewritten), repeats)  # type: ignore[misc]
        yield Timing(flag, transform, replay, len(rewritten.ops))


def measure(folder: Path, *, quick: bool) -> Section:
    """Times them on this machine."""
    step = record_deep(folder)
    timings = list(time_policies(step, repeats=3 if quick else 21))
    return Section(
        title="Speed of predictions",
        how=(
            f"A recorded step of a transformer with {BLOCKS} tiny layers, trained with AdamW in a loop: "
            f"{len(step.ops):,} operators, {len(step.storages):,} storages. Median processor time of rewriting the "
            "step and of replaying the result: the fastest, the median and the slowest policy."
        ),
        columns=COLUMNS,
        rows=[_row(timing) for timing in timings],
        bar=Bar(
            f"transform and replay within {BAR_MS:.0f} ms",
            f"{max(t.transform_ms + t.replay_ms for t in timings):.1f} ms",
            passed=all(t.passed for t in timings if not t.refusal),
        ),
        brief=(COLUMNS, least_middle_most([_row(timing) for timing in timings if not timing.refusal], 2)),
    )


def _row(timing: Timing) -> tuple[str, ...]:
    if timing.refusal:
        return (timing.flag, "", "", "", "refused")
    return (
        timing.flag,
        f"{timing.ops:,}",
        f"{timing.transform_ms:.1f}",
        f"{timing.replay_ms:.1f}",
        "passed" if timing.passed else "not passed",
    )


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1000
