"""An arrangement: how a job is divided over devices, the links between them, and what collectives cost on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memprof.policies.shard.division import Ring
from memprof.policies.shard.policy import Shard

#: Schedules of pipeline stages, by the names that torch.distributed.pipelining uses; interleaved has two chunks a rank.
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
CHUNKS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
#: Which layers are checkpointed.
CHECKPOINTED = ("none", "alternate", "all")
#: What is kept in host memory.
OFFLOADED = ("nothing", "optimizer", "activations")
#: Devices that share a node, and what each sends to other nodes in 10^9 bytes a second, by default:
#: eight devices with a 400 Gbit/s adapter each, as in NVIDIA's DGX H100 and in torchtitan's benchmarks of 2024.
DEVICES_PER_NODE = 8
NODE_GIGABYTES_PER_SECOND = 50.0


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


@dataclass(frozen=True)
class Group(Ring):
    """Ranks that communicate with each other, along a ring where nothing else is faster."""

    def all_reduce_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has the sum: on a ring, or on two trees where the data is small.

        The ring sends 2(p-1)/p of the data in 2(p-1) messages, the trees twice the data in 2 log2 p (Sanders, Speck and
        Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan").
        """
        if self.ranks < 2:
            return 0.0
        tree = 2 * math.ceil(math.log2(self.ranks)) * self.latency_us + 2 * total_bytes / self.bytes_per_us
        return min(super().all_reduce_us(total_bytes), tree)

    def all_to_all_us(self, own_bytes: float) -> float:
        """Returns the time until every rank has sent each other its part: (p-1)/p of a rank's own data leaves it."""
        return self.all_gather_us(own_bytes)

    def send_us(self, sent_bytes: float) -> float:
        """Returns the time of one message to the next rank."""
        return self.latency_us + sent_bytes / self.bytes_per_us if self.ranks > 1 else 0.0


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
        devices: Number of devices.
        per_node: Devices of a node.
        peer_bytes_per_us: What a device sends at once to another of its node.
        node_bytes_per_us: What a device sends at once to another node.
        host_bytes_per_us: What a device sends to its host's memory.
        latency_us: Latency of a message.
    """

    devices: int
    per_node: int
    peer_bytes_per_us: float
    node_bytes_per_us: float
    host_bytes_per_us: float
    latency_us: float = Shard.link_latency_us

    def group(self, ranks: int, stride: int) -> Group:
        """Returns a group of ranks that are a number of devices apart.

        Where it spans nodes, every member on a node has a link of its own to the next node, and what it sends is
        divided among them, up to the speed inside the node.

        Args:
            ranks: Number of ranks in it.
            stride: Devices from one member to the next.
        """
        speed = self.peer_bytes_per_us
        if ranks * stride > self.per_node:
            speed = min(speed, self.node_bytes_per_us * max(1, self.per_node // stride))
        return Group(ranks, speed, self.latency_us)
