"""Divides parameters, gradients and optimizer state over ranks (ZeRO stages 1 to 3, FSDP), or copies them (DDP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy

if TYPE_CHECKING:
    from memprof.policies.job import Job
    from memprof.trace.step import Step


@dataclass(frozen=True)
class Shard(Policy):
    """Divides parameters, gradients and optimizer state over ranks, each with the recorded batch.

    Attributes:
        stage: What is divided. 0: nothing, gradients are averaged (DDP); 1: optimizer state; 2: gradients too; 3:
            parameters too (FSDP).
        world_size: Number of ranks.
        reshard_after_forward: In stage 3, drop a unit's parameters after its forward and gather them again for
            backward; the unit of the root module keeps them.
        units: Patterns of the modules gathered as one in stage 3; by default the layers in module lists. What is in
            none of them belongs to the root's unit.
        bucket_mib: Gradients sent at once in stages 0 to 2, in MiB; the first bucket is 1 MiB as in DDP.
        link_gigabytes_per_second: What a rank can send to the next of the ring, in 10^9 bytes a second.
        link_latency_us: What one message of the ring takes besides.
    """

    name: ClassVar[str] = "shard"
    flag_help: ClassVar[str] = "Predict one rank of a sharded job: ddp, zero1, zero2 or fsdp, and the number of ranks."
    flag_example: ClassVar[str] = "fsdp:8"
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "modelled"

    stage: int = 3
    world_size: int = 1
    reshard_after_forward: bool = True
    units: tuple[str, ...] = ()
    bucket_mib: int = 25
    link_gigabytes_per_second: float = 25.0
    link_latency_us: float = 5.0

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            PolicyError: One of them makes no sense.
        """
        if type(self.stage) is not int or not 0 <= self.stage <= 3:
            raise PolicyError(f"shard has the stages 0 (ddp), 1, 2 and 3 (fsdp), not {self.stage!r}; write stage = 3.")
        if type(self.world_size) is not int or self.world_size < 1:
            raise PolicyError(
                f"shard needs a world size of at least 1 rank, not {self.world_size!r}; write world_size = 8."
            )
        if type(self.bucket_mib) is not int or self.bucket_mib < 1:
            raise PolicyError(f"shard needs buckets of at least 1 MiB, not {self.bucket_mib!r}; write bucket_mib = 25.")
        if not self.link_gigabytes_per_second > 0:
            raise PolicyError(
                f"shard needs a link that sends something, not {self.link_gigabytes_per_second!r} gigabytes a second; "
                "write link_gigabytes_per_second = 25.0."
            )
        if not self.link_latency_us >= 0:
            raise PolicyError(
                f"shard needs a latency of 0 or more microseconds, not {self.link_latency_us!r}; "
                "write link_latency_us = 5.0."
            )

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``--shard fsdp:8``, also ddp, zero1, zero2, zero3 and a stage's number.

        Raises:
            PolicyError: It is none of these.
        """
        strategy, _, ranks = text.strip().lower().partition(":")
        stages = {"ddp": 0, "0": 0, "zero1": 1, "1": 1, "zero2": 2, "2": 2, "zero3": 3, "fsdp": 3, "3": 3}
        try:
            return cls(stage=stages[strategy], world_size=int(ranks))
        except (KeyError, ValueError):
            raise PolicyError(
                f"--shard takes ddp, zero1, zero2 or fsdp and a number of ranks, not {text!r}; write --shard fsdp:8."
            ) from None

    def transform(self, step: Step) -> Step:
        """Rewrites the step into that of one rank; see Policy.transform."""
        from memprof.policies.shard.transform import transform_shard

        return transform_shard(step, self)

    def apply(self, job: Job) -> None:
        """Refuses: it only predicts so far; see Policy.apply."""
        from memprof.policies.shard.apply import apply_shard

        apply_shard(job, self)

    def describe(self) -> str:
        """Says what is divided over how many ranks."""
        what = ("ddp", "zero1", "zero2", "fsdp")[self.stage]
        kept = " without resharding" if self.stage == 3 and not self.reshard_after_forward else ""
        return f"shard {what}{kept} over {self.world_size} rank{'s' * (self.world_size != 1)}"
