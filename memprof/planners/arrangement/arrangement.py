"""An arrangement: how a job is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass

#: Schedules of pipeline stages, by the names that torch.distributed.pipelining uses; interleaved has two chunks a rank.
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
CHUNKS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}

#: Which layers are checkpointed.
CHECKPOINTED = ("none", "alternate", "all")

#: What is kept in host memory.
OFFLOADED = ("nothing", "optimizer", "activations")


@dataclass(frozen=True)
class Arrangement:
    """How a job is divided over devices.

    Ranks are numbered with tensor parallelism innermost, then context, data, and pipeline stages outermost.

    Attributes:
        data: Data-parallel replicas.
        tensor: Ranks that divide each matrix, and, by sequence parallelism, the activations between.
        pipeline: Stages of the pipeline.
        context: Ranks that divide each sequence.
        expert: Ranks of the data-parallel ones that divide the experts.
        zero: ZeRO stage, over data and context ranks together: 0 (ddp) to 3, as in the policy Shard.
        micro_batches: Rounds of forward and backward in an update.
        samples: Samples of a micro-batch.
        schedule: One of SCHEDULES; "" without a pipeline.
        checkpointed: One of CHECKPOINTED.
        offloaded: One of OFFLOADED.
        split: Number of units of each chunk of the pipeline, in order of forward; empty without a pipeline.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    micro_batches: int = 1
    samples: int = 1
    schedule: str = ""
    checkpointed: str = "none"
    offloaded: str = "nothing"
    split: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO divides."""
        return self.data * self.context

    @property
    def chunks(self) -> int:
        """Chunks of the model that each rank of the pipeline has."""
        return CHUNKS.get(self.schedule, 1)

    @property
    def is_data_parallel(self) -> bool:
        """Whether it divides nothing but the batch and the model's state, which memprof applies itself."""
        return self.tensor == self.pipeline == self.context == self.expert == 1

    def describe(self) -> str:
        """Describes it in few words, such as ``dp 4 fsdp, tp 2``."""
        state = ("ddp", "zero1", "zero2", "fsdp")[self.zero] if self.shards > 1 else ""
        parts = [f"dp {self.data} {state}".rstrip() if self.data > 1 else state]
        for word, ranks in (("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context), ("ep", self.expert)):
            if ranks > 1:
                parts.append(f"{word} {ranks}")
        return ", ".join(part for part in parts if part) or "one device"
