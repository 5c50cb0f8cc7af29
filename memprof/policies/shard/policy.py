"""Shards parameters, gradients and optimizer state over ranks (ZeRO stages 1 to 3, FSDP), or replicates them (DDP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Candidates, Policy

if TYPE_CHECKING:
    from memprof.trace.step import Step

#: Choices for a rank's batches.
BATCHES = ("keep", "split")


@dataclass(frozen=True)
class Shard(Policy):
    """Shards parameters, gradients and optimizer state over ranks.

    Attributes:
        stage: What is sharded. 0: nothing, gradients are averaged (DDP); 1: optimizer state; 2: gradients too, and
            parameters between steps (FSDP that keeps gathered parameters until the end of backward); 3: parameters
            at all times (FSDP).
        world_size: Number of ranks.
        batch: A rank's batches. keep: different batches per rank, each as large as the recorded one; split: its part of
            each batch, so that an update covers the same samples as on one rank.
        reshard_after_forward: In stage 3, free a unit's parameters after its forward and gather them again for
            backward; the unit of the root module keeps them.
        units: Patterns of the modules gathered together in stages 2 and 3; by default the layers in module lists.
            Everything else belongs to the root's unit.
        bucket_mib: Gradients sent at once in stages 0 and 1, in MiB; the first bucket is 1 MiB as in DDP.
        link_gigabytes_per_second: Bandwidth from a rank to the next in the ring, in 10^9 bytes per second.
        link_latency_us: Latency of each message in the ring.
    """

    name: ClassVar[str] = "shard"
    live_refusal: ClassVar[str] = "parameters are divided before an optimizer holds them"
    flag_words: ClassVar[tuple[str, ...]] = ("ddp", "zero1", "zero2", "fsdp")
    frameworks_set_it: ClassVar[bool] = True
    set_in_framework: ClassVar[Mapping[str, str]] = {
        "hf": "the Trainer shards the model itself. Set fsdp or deepspeed, and start it with torchrun.",
        "lightning": "the Trainer shards the model itself. Set strategy='fsdp' or 'ddp'.",
    }
    flag_help: ClassVar[str] = "Shard the job over ranks: ddp, zero1, zero2 or fsdp (or stage 0 to 3), and how many."
    flag_example: ClassVar[str] = "fsdp:8"
    numerics: ClassVar[str] = "rounding"
    source: ClassVar[str] = "modelled"
    errors_seen: ClassVar[tuple[float, float]] = (0.03, 0.03)

    stage: int = 3
    world_size: int = 1
    batch: str = "keep"
    reshard_after_forward: bool = True
    units: tuple[str, ...] = ()
    bucket_mib: int = 25
    link_gigabytes_per_second: float = 25.0
    link_latency_us: float = 5.0

    def __post_init__(self) -> None:
        """Validates the settings."""
        if type(self.stage) is not int or not 0 <= self.stage <= 3:
            raise PolicyError(f"shard: invalid stage {self.stage!r}; write 0 (ddp), 1, 2 or 3 (fsdp).")
        if type(self.world_size) is not int or self.world_size < 1:
            raise PolicyError(
                f"shard needs a world size of at least 1 rank, not {self.world_size!r}; write world_size = 8."
            )
        if self.batch not in BATCHES:
            raise PolicyError(f"shard: invalid batch {self.batch!r}; write batch = 'keep' or batch = 'split'.")
        if type(self.bucket_mib) is not int or self.bucket_mib < 1:
            raise PolicyError(f"shard needs buckets of at least 1 MiB, not {self.bucket_mib!r}; write bucket_mib = 25.")
        if not self.link_gigabytes_per_second > 0:
            raise PolicyError(
                f"shard needs a positive link bandwidth, not {self.link_gigabytes_per_second!r} GB/s; "
                "write link_gigabytes_per_second = 25.0."
            )
        if not self.link_latency_us >= 0:
            raise PolicyError(
                f"shard needs a latency of 0 or more microseconds, not {self.link_latency_us!r}; "
                "write link_latency_us = 5.0."
            )

    @property
    def why_not_torch(self) -> str:
        """Empty: torch has an equivalent."""
        return ""

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``--shard fsdp:8``, also ddp, zero1, zero2, zero3 and a stage's number, and ``fsdp:8:split``.

        Raises:
            PolicyError: The text is none of these.
        """
        strategy, _, rest = text.strip().lower().partition(":")
        ranks, _, batch = rest.partition(":")
        stages = {"ddp": 0, "0": 0, "zero1": 1, "1": 1, "zero2": 2, "2": 2, "zero3": 3, "fsdp": 3, "3": 3}
        try:
            return cls(stage=stages[strategy], world_size=int(ranks), batch=batch or BATCHES[0])
        except (KeyError, ValueError):
            raise PolicyError(
                f"--shard takes ddp, zero1, zero2 or fsdp and a number of ranks, not {text!r}; write --shard fsdp:8, "
                "or --shard fsdp --world-size 8."
            ) from None

    @property
    def starts_early(self) -> bool:
        """The process needs its rank's device and data before the job starts."""
        return self.world_size > 1

    def changes(self, step: Step) -> tuple[str, ...]:
        """Returns that statistics of batches are those of each rank's own samples, except SyncBatchNorm's."""
        from memprof.policies.rewrite.stack_marks import batch_norms

        types = dict(zip(step.modules.name.tolist(), step.modules.type.tolist(), strict=True))
        is_own = any(types.get(name) != "SyncBatchNorm" for name in batch_norms(step))
        return ("BatchNorm layers take statistics over each rank's own samples",) if is_own else ()

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        """Returns every ZeRO stage, from two ranks on."""
        stages = range(4) if world_size > 1 else ()
        return Candidates(tuple(cls(stage=stage, world_size=world_size) for stage in stages))

    def describe(self) -> str:
        """Describes what is sharded over how many ranks."""
        what = ("ddp", "zero1", "zero2", "fsdp")[self.stage]
        kept = " without resharding" if self.stage == 3 and not self.reshard_after_forward else ""
        split = ", each with its part of the batch" if self.batch == "split" else ""
        return f"shard {what}{kept} over {self.world_size} rank{'s' * (self.world_size != 1)}{split}"
