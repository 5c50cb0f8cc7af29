"""A step's requests to the caching allocator: one per allocation, free and workspace, in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.replay.allocator.events import ALLOCATE, FREE, Requests, fullest_device, order_requests, replay
from memprof.replay.allocator.rules import Settings
from memprof.trace.files.coded import coded_column
from memprof.trace.schema import NONE, Bools, Ints, Ops, Storages
from memprof.trace.step import Step

#: Runs of a step: the first starts from the blocks of the job's start, and the second differs from later ones.
RUNS = 3


@dataclass(frozen=True, eq=False)
class StepRequests:
    """The requests of a step that follows others, so that it starts from what they left behind.

    Attributes:
        requests: The requests.
        steady_from: The first event of the last run.
        op_id: Operator of the step during or after which each event happens, NONE before the first,
            shape ``(events,)``.
        storage_id: Storage of each allocation, NONE for workspaces, shape ``(allocations,)``.
        made_by: Operator that made each allocation, NONE for those from before the step.
        device: Device whose memory it is, such as ``cuda:0``; ``cpu`` where the step ran there.
    """

    requests: Requests
    steady_from: int
    op_id: Ints
    storage_id: Ints
    made_by: Ints
    device: str


def requests_of_step(step: Step) -> StepRequests:
    """Lists the requests of a step.

    Storages live before the step are allocated first, in order of birth, except optimizer state, which a job's first
    update makes. The step is then run ``RUNS`` times: storages that outlive one run (gradients, say) replace, in the
    next, those live at the start of the step. On a device, only its own memory counts; a step recorded on CPU makes the
    requests it would make on a device. Memory is allocated on the stream of the operator that makes it.
    """
    return _requests_of_runs(step, [_RunRequests.of(step.storages, step.ops)] * RUNS)


def requests_of_steps(steps: Sequence[Step]) -> StepRequests:
    """Lists the requests of consecutive steps of different sizes; see ``requests_of_step``.

    Args:
        steps: One step at several sizes: the same operators and storages, row by row, with other bytes.

    Raises:
        ValueError: The steps do not have the same operators and storages.
    """
    every = [_RunRequests.of(step.storages, step.ops) for step in steps]
    issued = every[0]
    if any(len(other.size) != len(issued.size) or (other.about != issued.about).any() for other in every):
        raise ValueError("the steps do not have the same operators and storages.")
    return _requests_of_runs(steps[0], every)


def _requests_of_runs(first: Step, every: Sequence[_RunRequests]) -> StepRequests:
    """Concatenates the requests of runs of one step."""
    issued = every[0]
    again, orphans = _second_run(issued)
    made = np.flatnonzero(issued.made_by != NONE)
    # Allocations are numbered run by run: first the first run's subjects, then those each later run makes.
    current = np.arange(len(issued.size))
    runs = issued.first_run(first)
    subject, size = [current], [issued.size]
    count = len(issued.size)
    leaving = np.setdiff1d(np.flatnonzero(again != NONE), made)
    for other in every[1:]:
        following = np.full(len(issued.size), NONE, dtype=np.int64)
        following[made] = count + np.arange(len(made))
        following[leaving] = current[again[leaving]]  # storages left by the previous run replace it
        about = following[issued.about]
        is_kept = about != NONE
        runs += [
            (np.full(len(orphans), FREE), current[orphans], np.full(len(orphans), len(first.ops) - 1)),
            (issued.kind[is_kept], about[is_kept], issued.moment[is_kept]),
        ]
        subject.append(made)
        size.append(other.size[made])
        count += len(made)
        current = following
    return issued.written(runs, np.concatenate(subject), np.concatenate(size))


def device_of(step: Step) -> str:
    """Returns the device with most of a step's bytes; ``cpu`` where no other device has any."""
    return fullest_device(coded_column(step.storages, "device"), step.storages.allocated_bytes)


def reserved_by_op(step: Step, settings: Settings | None = None) -> Ints:
    """Returns the peak reserved bytes during each operator of a step, shape ``(ops,)``.

    Args:
        step: The step, recorded or predicted.
        settings: The allocator's settings; torch's defaults if omitted.
    """
    issued = requests_of_step(step)
    reserved = replay(issued.requests, settings).reserved()
    curve = np.full(len(step.ops), NONE, dtype=np.int64)
    np.maximum.at(curve, issued.op_id[issued.steady_from :], reserved[issued.steady_from :])
    # An operator without requests runs with the previous reserved bytes.
    last = np.maximum.accumulate(np.where(curve == NONE, NONE, np.arange(len(curve))))
    before = int(reserved[issued.steady_from - 1]) if issued.steady_from else 0
    filled: Ints = np.where(last == NONE, before, curve[last])
    return filled


@dataclass(frozen=True, eq=False)
class _RunRequests:
    """The requests of one run. Subjects are storages, then workspaces; columns but events have shape ``(subjects,)``.

    Attributes:
        size: Bytes requested.
        stream: Stream of the operator that makes each, 0 if live before.
        storage_id: Storage, NONE for workspaces.
        made_by: Operator, NONE if live before.
        storages: The storages among them, in the same order.
        base: Subjects live before, in order.
        kind: ALLOCATE or FREE, shape ``(events,)``.
        about: Subject of each event.
        moment: Operator of each event.
        device: Device whose memory it is.
    """

    size: Ints
    stream: Ints
    storage_id: Ints
    made_by: Ints
    storages: Storages
    base: Ints
    kind: Ints
    about: Ints
    moment: Ints
    device: str

    @staticmethod
    def of(storages: Storages, ops: Ops) -> _RunRequests:
        """Orders the allocations, workspaces and frees of one device's memory."""
        device = fullest_device(coded_column(storages, "device"), storages.allocated_bytes)
        is_owned = (storages.allocated_bytes > 0) & (storages.requested_bytes > 0)
        if device != "cpu":
            is_owned &= storages.device == device
        rows, workers = np.flatnonzero(is_owned), np.flatnonzero(ops.workspace_bytes > 0)
        owned = storages.take(rows)
        made_by = np.concatenate([owned.created_op_id, workers])
        kind, about, moment = order_requests(owned.created_op_id, owned.freed_op_id, workers)
        stream = np.zeros(len(made_by), dtype=np.int64)
        stream[made_by != NONE] = ops.stream[made_by[made_by != NONE]]
        return _RunRequests(
            size=np.concatenate([owned.requested_bytes, ops.workspace_bytes[workers]]),
            stream=stream,
            storage_id=np.concatenate([rows, np.full(len(workers), NONE)]),
            made_by=made_by,
            storages=owned,
            base=np.flatnonzero(made_by == NONE),
            kind=kind.astype(np.int64),
            about=about.astype(np.int64),
            moment=moment,
            device=device,
        )

    def first_run(self, step: Step) -> list[tuple[Ints, Ints, Ints]]:
        """Returns the events before a job's first step and those of it, whose update creates optimizer state."""
        updates = np.flatnonzero(step.ops.phase == "optimizer")
        found = self.storages.take(self.base)
        is_state = (found.category == "optimizer_state") & (found.freed_op_id == NONE)
        late = self.base[is_state & bool(len(updates))]
        early = np.setdiff1d(self.base, late)
        begin = int(updates[0]) if len(late) else NONE
        place = int(np.searchsorted(self.moment, begin))
        first = (
            np.insert(self.kind, place, np.full(len(late), ALLOCATE)),
            np.insert(self.about, place, late),
            np.insert(self.moment, place, np.full(len(late), begin)),
        )
        return [(np.full(len(early), ALLOCATE), early, np.full(len(early), NONE)), first]

    def written(self, runs: list[tuple[Ints, Ints, Ints]], subject: Ints, size: Ints) -> StepRequests:
        """Concatenates runs into one sequence.

        Args:
            runs: Kinds, allocations and operators of the events of each; the last is the steady one.
            subject: The subject of each allocation.
            size: Bytes requested by each allocation.
        """
        kind, allocation, op_id = (np.concatenate(columns) for columns in zip(*runs, strict=True))
        return StepRequests(
            requests=Requests(
                kind=kind.astype(np.int8),
                allocation=allocation.astype(np.int32),
                size=size,
                stream=self.stream[subject],
                owner=np.zeros(len(subject), dtype=np.int32),
            ),
            steady_from=len(kind) - len(runs[-1][0]),
            op_id=op_id.astype(np.int64),
            storage_id=self.storage_id[subject],
            made_by=self.made_by[subject],
            device=self.device,
        )


def _second_run(issued: _RunRequests) -> tuple[Ints, Ints]:
    """Numbers the allocations of a second run.

    Returns:
        The allocation of each subject in the second run, NONE where the first left none; and the allocations of the
        first run to free in between, since nothing in the second frees them.
    """
    created, freed = issued.storages.created_op_id, issued.storages.freed_op_id
    outlives, leaves = (created != NONE) & (freed == NONE), (created == NONE) & (freed != NONE)
    again = np.full(len(issued.size), NONE, dtype=np.int64)
    made = np.flatnonzero(issued.made_by != NONE)
    again[made] = len(issued.size) + np.arange(len(made))
    heirs = _heirs(issued.storages, leaves, outlives)
    for leaving, heir in heirs.items():
        again[leaving] = heir
    return again, np.setdiff1d(np.flatnonzero(outlives), np.array(list(heirs.values()), dtype=np.int64))


def _heirs(storages: Storages, leaves: Bools, outlives: Bools) -> dict[int, int]:
    """Pairs storages a step finds and frees with those it makes and leaves: by name and size, else by size."""
    waiting: dict[tuple[str, str, int], deque[int]] = defaultdict(deque)
    heirs: dict[int, int] = {}
    for exact in (True, False):
        waiting.clear()
        taken = set(heirs.values())
        for row in np.flatnonzero(outlives).tolist():
            if row not in taken:
                waiting[_kin(storages, row, exact=exact)].append(row)
        for row in np.flatnonzero(leaves).tolist():
            candidates = waiting.get(_kin(storages, row, exact=exact))
            if row not in heirs and candidates:
                heirs[row] = candidates.popleft()
    return heirs


def _kin(storages: Storages, row: int, *, exact: bool) -> tuple[str, str, int]:
    name, category = (str(storages.name[row]), str(storages.category[row])) if exact else ("", "")
    return name, category, int(storages.requested_bytes[row])
