"""Follows what a rank does in its dry run, also in pipelines, to find ranks that do the same.

Source: torch.distributed.pipelining. Before its first micro-batch a stage runs its module once, forward and backward,
to learn the sizes that it exchanges, unless the job has given them. It runs one micro-batch forward or backward in a
call of its own; the schedule contains the order of these calls on each rank.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.compiled.late_import import LateImport
from memprof.trace.files.rank_roles import RankRole, StageSurvey, write_communicators
from memprof.virtual.ranks.collectives import connects_all, device_group

#: Results up to this size are not compared: one rank may log a loss.
_LEAST_BYTES = 512
#: Sums of digests are taken modulo this number.
_TOTALS = 1 << 62


class Role:
    """The role of this process so far.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job; 0 until it creates its process group.
    """

    def __init__(self, spool: Path) -> None:
        """Starts with no operators and no process group.

        Args:
            spool: The recording's spool folder, which receives the communicators.
        """
        self._spool, self._pid = spool, os.getpid()
        self.rank = 0
        self.world_size = 0
        self._groups: dict[tuple[int, ...], None] = {}
        self._peers: set[int] = set()
        self._digest = self._total = 0
        self._sums: Counter[str] = Counter()
        self._part: int | None = None
        #: Peers of each NCCL communicator, by its key: none for those that only run collectives among all members.
        self._communicators: dict[str, set[int]] = {}

    def join(self, rank: int, world_size: int) -> None:
        """Notes that the job created its process group."""
        self.rank, self.world_size = rank, world_size
        self._write_communicators()

    def note_group(self, ranks: Sequence[int]) -> None:
        """Notes a process group, of which this rank may not be a member."""
        self._groups[tuple(sorted(ranks))] = None

    def note_peer(self, rank: int) -> None:
        """Notes that a tensor was sent to a rank, or received from it."""
        self._peers.add(rank)

    def note_operator(self, func: Any, result: Any) -> None:
        """Notes an operator's name and the size of its result."""
        size = _size(result)
        if size > _LEAST_BYTES:
            text = f"{func} {size}".encode()
            self._digest = zlib.crc32(text, self._digest)
            if not _returns_view(func):
                self._sums[str(func)] += size
            self._total = (self._total + zlib.crc32(text)) % _TOTALS
            if self._part is not None:
                self._part = zlib.crc32(text, self._part)

    def begin_part(self) -> int:
        """Starts a digest of the next operators alone; returns that of all before."""
        self._part = 0
        return self._digest

    def end_part(self) -> int:
        """Returns the digest of the operators since ``begin_part``."""
        part, self._part = self._part or 0, None
        return part

    def note_collective(self, func: Any, args: Any) -> None:
        """Notes the communicator of a collective on the device; an all-to-all connects each rank to all others."""
        group = device_group(func, args)
        if group is not None:
            self.note_reduction(group, torch.distributed.get_process_group_ranks(group) if connects_all(func) else ())

    def note_reduction(self, group: Any, peers: Sequence[int] = ()) -> None:
        """Notes the communicator of a process group, which runs collectives on the device.

        Args:
            group: The group.
            peers: Ranks to which this one sends, besides its neighbours.
        """
        if group.size() > 1:
            self._communicate(group.group_name, peers)

    def note_transfer(self, rank: int, group: Any, *, is_batched: bool) -> None:
        """Notes the communicator of a tensor on the device that is sent or received.

        torch creates one for each pair of ranks, and uses the group's for transfers in a batch.
        """
        groups: Any = torch.distributed.distributed_c10d
        name = (group or groups.GroupMember.WORLD).group_name
        self._communicate(name if is_batched else f"{name} {rank}", (rank,))

    def _communicate(self, key: str, peers: Sequence[int]) -> None:
        is_new = key not in self._communicators
        known = self._communicators.setdefault(key, set())
        fresh = {peer for peer in peers if peer != self.rank} - known
        known |= fresh
        if is_new or fresh:
            self._write_communicators()

    def _write_communicators(self) -> None:
        """Writes the communicators so far, in the rank's own process: it may be killed before its end."""
        if os.getpid() == self._pid:
            with suppress(OSError):  # a full disk must not end the job
                write_communicators(self._spool, self.rank, self._count_communicators())

    def write(self) -> None:
        """Writes the role into the spool folder, for the parent; nothing without a process group, or once forked.

        Raises:
            OSError: It cannot be written.
        """
        if not self.world_size or os.getpid() != self._pid:
            return
        groups = [list(group) for group in self._groups]
        RankRole(
            self.rank,
            self.world_size,
            groups,
            sorted(self._peers),
            self._digest,
            self._total,
            dict(self._sums),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        ).write(self._spool)

    def _count_communicators(self) -> dict[str, int]:
        """Returns the values of a `Communicators`."""
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) or 1
        node = self.rank // on_node
        connected = [[peer // on_node == node for peer in peers] for peers in self._communicators.values()]
        return {
            "count": len(connected),
            "near_peers": sum(map(sum, connected)),
            "sending_far": sum(not all(peers) for peers in connected),
        }


@cache
def _returns_view(func: Any) -> bool:
    """Whether an operator returns a view of an argument, or the argument itself."""
    return any(value.alias_info is not None for value in func._schema.returns)


def _size(result: Any) -> int:
    made = (each for each in tensors_in(result) if isinstance(each, FakeTensor) and each.layout is torch.strided)
    return sum(each.nbytes for each in made)


if TYPE_CHECKING:
    pass

_PACKAGE = "torch.distributed.pipelining"
_FORWARD, _BACKWARD = "forward_one_chunk", "backward_one_chunk"
#: The calls in which a stage learns its sizes; torch before 2.13 has none.
_INFERENCE = ("_compute_outputs", "_compute_input_grads")
#: Actions of a schedule that store a micro-batch, and those that free it (backward, or its part for the input).
_STORES, _FREES = "F", ("B", "I")


class PipelineStages:
    """What the stages of this rank do with one micro-batch, and how many they store at a time."""

    def __init__(self, role: Role, spool: Path, *, is_on_device: bool) -> None:
        """Changes nothing yet.

        Args:
            role: Follows this rank's operators.
            spool: The recording's spool folder, which receives the survey.
            is_on_device: Whether the job runs on a virtual GPU. Where a stage does not learn its sizes, its first
                forward is then enough, with the bytes that it stores; else also its first backward is needed.
        """
        #: Calls of which any set is enough.
        self._surveys = _INFERENCE, ((_FORWARD,) if is_on_device else (_FORWARD, _BACKWARD))
        self._role = role
        self._spool = spool
        self._before: int | None = None
        #: The digest of the first call of each kind, and the bytes that it stored, by the number of the stage.
        self._digests: dict[tuple[int, str], tuple[int, int]] = {}
        self._stages: list[int] = []
        self._stored = 0
        self._is_complete = False

    def install(self) -> None:
        """Replaces methods of torch's stages and schedules once the job has imported them."""
        folder = Path(torch.__file__).parent / "distributed" / "pipelining"
        wanted: dict[str, Callable[[ModuleType], None]] = {
            f"{_PACKAGE}.stage": self._follow_stages,
            f"{_PACKAGE}.schedules": self._follow_schedules,
        }
        LateImport(folder, wanted).install()

    def _follow_stages(self, module: ModuleType) -> None:
        kinds = [getattr(module, name, None) for name in ("_PipelineStageBase", "PipelineStage")]
        for kind in filter(None, kinds):
            for name in (name for names in self._surveys for name in names if name in vars(kind)):
                setattr(kind, name, self._followed(name, getattr(kind, name)))

    def _followed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
            key = int(stage.stage_index), name
            if not self._stages or self._is_complete or key in self._digests:
                return original(stage, *args, **kwargs)
            before = self._role.begin_part()
            self._before = before if self._before is None else self._before
            allocated_bytes = torch.cuda.memory_allocated()
            result = original(stage, *args, **kwargs)
            self._digests[key] = self._role.end_part(), torch.cuda.memory_allocated() - allocated_bytes
            self._write_if_complete()
            return result

        return call

    def _follow_schedules(self, module: ModuleType) -> None:
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            kind: Any = getattr(module, name, None)
            if kind is not None:
                kind.step = self._stepped(kind.step)

    def _stepped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._stages:
                self._read(schedule)
            return original(schedule, *args, **kwargs)

        return step

    def _read(self, schedule: Any) -> None:
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        orders = getattr(schedule, "pipeline_order", None) or {}
        actions = orders.get(stages[0].group_rank)
        if actions:
            self._stages = [int(stage.stage_index) for stage in stages]
            self._stored = most_stored(_kinds(actions))

    def _write_if_complete(self) -> None:
        for names in self._surveys:
            keys = [(stage, name) for stage in self._stages for name in names]
            if all(key in self._digests for key in keys):
                digests = (self._before, *(self._digests[key] for key in keys))
                StageSurvey(zlib.crc32(repr(digests).encode()), self._stored).write(self._spool, self._role.rank)
                self._is_complete = True
                return


def _kinds(actions: Iterable[Any]) -> Iterator[str]:
    """Yields the kinds of actions, those inside combined ones included."""
    for action in actions:
        if action is not None:
            parts = getattr(action, "sub_actions", None)
            yield from _kinds(parts) if parts else (str(action.computation_type.value),)


def most_stored(actions: Iterable[str]) -> int:
    """Returns the maximum number of micro-batches that a rank stores at a time, summed over its stages.

    Args:
        actions: The kinds of its actions in order, as torch abbreviates them.
    """
    stored = most = 0
    for action in actions:
        stored += (action == _STORES) - (action in _FREES)
        most = max(most, stored)
    return most
