"""How many devices a job needs: one rank's peak under each sharding strategy, over 2 to 1,024 ranks."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.errors import PolicyError
from memprof.machines.catalogue import Accelerator
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.step import Step

WORLD_SIZES = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class OneRank:
    """Memory and step time of one rank of many.

    Attributes:
        policy: The sharding strategy.
        peak_allocated_bytes: Peak of the fullest rank.
        step_time_us: Its step time, including exposed communication.
        exposed_us: Added step time over a single rank.
    """

    policy: Shard
    peak_allocated_bytes: int
    step_time_us: float
    exposed_us: float


@dataclass(frozen=True)
class Devices:
    """One rank's step under each sharding strategy.

    Attributes:
        budget_bytes: Memory of a device.
        communicator_bytes: What one of several ranks takes of it for its communicator.
        alone_bytes: Peak on one device.
        alone_us: Step time on one device.
        ranks: All strategies, by number of ranks and then stage.
        refused: Why a strategy is not possible, each sentence once.
    """

    budget_bytes: int
    communicator_bytes: int
    alone_bytes: int
    alone_us: float
    ranks: tuple[OneRank, ...]
    refused: tuple[str, ...]

    @property
    def needed(self) -> OneRank | None:
        """The fastest strategy on the fewest devices that fit; None where none fits."""
        fitting = filter(self.fits, self.ranks)
        return min(fitting, key=lambda each: (each.policy.world_size, each.step_time_us), default=None)

    def fits(self, rank: OneRank) -> bool:
        """Returns whether one of several ranks fits."""
        return rank.peak_allocated_bytes + self.communicator_bytes <= self.budget_bytes

    @property
    def fits_alone(self) -> bool:
        """Whether one device is enough."""
        return self.alone_bytes <= self.budget_bytes


def devices_needed(
    step: Step,
    budget_bytes: int,
    machine: Accelerator | None = None,
    *,
    communicator_bytes: int = 0,
    batch: str = "keep",
) -> Devices:
    """Predicts one rank under ddp and the three stages, over 2 to 1,024 ranks.

    Args:
        step: The recorded step, of a single rank without sharding.
        budget_bytes: Memory of a device.
        machine: The device, whose catalogued link bandwidth the collectives use; None for typical links.
        communicator_bytes: What one of several ranks takes of the budget for its communicator.
        batch: The batch of a rank, as in Shard.
    """
    link = Shard.link_gigabytes_per_second
    if machine is not None and machine.peer_bytes_per_us:
        link = machine.peer_bytes_per_us / 1e3
    found: list[OneRank] = []
    refused: dict[str, None] = {}
    for world_size in WORLD_SIZES:
        for stage in range(4):
            policy = Shard(stage, world_size, batch=batch, link_gigabytes_per_second=link)
            try:
                rank = policy.transform(step)
            except PolicyError as error:
                refused[str(error)] = None
                continue
            peak = int(live_bytes(rank).during.max(initial=0))
            found.append(OneRank(policy, peak, rank.duration_us, max(0.0, rank.duration_us - step.duration_us)))
    alone = int(live_bytes(step).during.max(initial=0))
    return Devices(budget_bytes, communicator_bytes, alone, step.duration_us, tuple(found), tuple(refused))
