"""Shared by all stages of sharding: parts, the sharded update, and collectives concurrent with the computation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memprof.policies.rewrite.draft import Draft
from memprof.policies.shard.division import Ring, complete_at, largest_parts
from memprof.replay.rounding import rounded_on_cuda
from memprof.trace.schema import NONE, Bools, Floats, Ints, Ops, Storages, Uses
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.shard.policy import Shard

#: What an inserted operator has, where it is not said otherwise: no traffic, no time.
_PLAIN = {
    **dict.fromkeys(("duration_us", "workspace_bytes", "flops", "stream", "read_bytes", "written_bytes"), 0),
    **dict.fromkeys(("is_recompute", "uses_rng", "mutates"), False),
    "forward_op_id": NONE,
    "kind": "compute",
}


class Sharding:
    """Converts one step into a rank's step.

    Attributes:
        step: The original step.
        policy: What to shard, over how many ranks.
        draft: The resulting step.
        part_bytes: Requested bytes of the largest rank's part of each storage. Shape (storages,).
        kept_at: Backward operator that completes each gradient; NONE for others. Shape (storages,).
        ring: Duration of collectives.
        timeline: When they run.
    """

    def __init__(self, step: Step, policy: Shard) -> None:
        self.step, self.policy = step, policy
        self.draft = Draft(step)
        self._rows: list[tuple[int, int, dict[str, Any]]] = []  # of operators: what each precedes and copies, columns
        self._storages: list[Storages] = []
        self._next_storage = len(step.storages)
        self._freed_after: dict[int, int] = {}
        self._uses: list[tuple[int, int, str]] = []
        self.ring = Ring(policy.world_size, policy.link_gigabytes_per_second * 1e3, policy.link_latency_us)
        self.timeline = Timeline(step)
        self.is_cuda = bool(np.char.startswith(step.storages.device.astype(str), "cuda").any())
        storages = step.storages
        self.part_bytes = largest_parts(storages, policy.world_size)
        self.is_parameter = storages.category == "parameter"
        self.is_gradient = storages.category == "gradient"
        self.is_born = storages.created_op_id != NONE
        self.kept_at = complete_at(step, self.is_gradient & self.is_born)
        optimizer = np.flatnonzero(step.ops.phase == "optimizer")
        self.update_begins = int(optimizer[0]) if len(optimizer) else len(step.ops)

    def finish(self) -> Step:
        """Assembles the resulting step."""
        self.draft.duration_us = self.timeline.duration_us(self.draft.ops.duration_us)
        self._insert()
        return self.draft.build()

    def _insert(self) -> None:
        """Inserts the operators, storages and uses added so far into the draft."""
        if not self._rows:
            return
        draft, before, like, columns = self.draft, *zip(*self._rows, strict=True)
        given = {
            column.name: np.asarray([row[column.name] for row in columns], dtype=column.dtype)
            for column in Ops.columns()
            if column.name in columns[0]
        }
        draft.insert_ops(draft.ops.take(np.asarray(like)).replace(**given), np.asarray(before))
        if self._storages:
            rows = Storages.joined(self._storages)
            for storage, after in self._freed_after.items():
                rows.freed_op_id[storage - len(draft.storages)] = after
            draft.insert_storages(rows)
        op_id, storage_id, role = zip(*self._uses, strict=True)
        draft.insert_uses(Uses.of(op_id=op_id, storage_id=storage_id, role=role))

    def divide_update(self) -> None:
        """Keeps a part of the optimizer's state, and of its temporaries during the update."""
        step, storages = self.step, self.draft.storages
        # By index, because comparing strings is slow.
        texts, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
        like_parameters = np.isin(shape_of, shape_of[self.is_parameter]) & (texts != "")[shape_of]
        is_update = np.append(step.ops.phase, "older")[step.storages.created_op_id] == "optimizer"
        divided = (storages.category == "optimizer_state") | (is_update & like_parameters)
        self.set_part(divided)
        touched = np.zeros(len(step.ops), dtype=np.bool_)
        touched[step.uses.op_id[divided[step.uses.storage_id]]] = True
        touched &= step.ops.phase == "optimizer"
        share = np.where(touched, 1 / self.policy.world_size, 1.0)
        ops = self.draft.ops
        self.draft.ops = ops.replace(
            duration_us=ops.duration_us * share,
            read_bytes=np.rint(ops.read_bytes * share).astype(np.int64),
            written_bytes=np.rint(ops.written_bytes * share).astype(np.int64),
            workspace_bytes=np.rint(ops.workspace_bytes * share).astype(np.int64),
        )

    def set_part(self, chosen: Bools) -> None:
        """Reduces storages to a rank's part."""
        storages = self.draft.storages
        parts = rounded_on_cuda(self.part_bytes) if self.is_cuda else self.part_bytes
        self.draft.storages = storages.replace(
            requested_bytes=np.where(chosen, self.part_bytes, storages.requested_bytes),
            allocated_bytes=np.where(chosen & (storages.allocated_bytes > 0), parts, storages.allocated_bytes),
        )

    def operator(self, name: str, before: int, like: int, **columns: Any) -> int:
        """Adds an operator, by default without traffic and duration; returns its id.

        Args:
            name: Its name.
            before: Operator of the step before which it runs.
            like: Operator of the step whose phase, module, micro-batch and start it copies.
            columns: Its other columns.
        """
        self._rows.append((before, like, {**_PLAIN, "name": name, **columns}))
        return len(self.step.ops) + len(self._rows) - 1

    def collective(
        self,
        name: str,
        before: int,
        duration_us: float,
        bytes_: int,
        *,
        needed_at: int,
        like: int,
        sent_at: int | None = None,
    ) -> int:
        """Adds a collective.

        Args:
            name: Its operator.
            before: Operator of the step before which it runs.
            duration_us: Its duration.
            bytes_: Total bytes it moves.
            needed_at: Operator of the step that waits for it.
            like: Operator of the step whose phase and module it copies.
            sent_at: Operator of the step before which it begins, if a device starts it earlier than ``before``.
        """
        self.timeline.send(before if sent_at is None else sent_at, duration_us, needed_at)
        return self.operator(
            name,
            before,
            like,
            kind="collective",
            stream=1,
            duration_us=duration_us,
            read_bytes=bytes_,
            written_bytes=bytes_,
        )

    def storage(self, bytes_: int, created: int, freed: int = NONE) -> int:
        """Adds a buffer of a collective."""
        devices = self.step.storages.device[self.is_parameter]
        rows = Storages.of(
            storage_id=[0],
            category=["collective"],
            device=[devices[0] if len(devices) else "cpu"],
            requested_bytes=[bytes_],
            allocated_bytes=[rounded_on_cuda(bytes_) if self.is_cuda else bytes_],
            created_op_id=[created],
            freed_op_id=[freed],
        )
        return int(self._add(rows)[0])

    def gradients(self, group: Ints, bytes_: Ints, created: int) -> Ints:
        """Adds one buffer of gradients, as one storage per gradient to keep their attribution.

        Args:
            group: The original gradients; the buffer is freed when the last of them was.
            bytes_: Bytes of each in the buffer. Shape (group,).
            created: Operator that allocates the buffer.

        Returns:
            Their ids. Shape (group,).
        """
        allocated = bytes_.copy()
        if self.is_cuda:  # the allocator rounds the buffer, not the gradients in it
            allocated[0] += rounded_on_cuda(int(bytes_.sum())) - int(bytes_.sum())
        rows = self.step.storages.take(group)
        return self._add(
            rows.replace(
                requested_bytes=bytes_,
                allocated_bytes=allocated,
                created_op_id=np.full(len(group), created),
                freed_op_id=np.full(len(group), self.last_free(group)),
            )
        )

    def _add(self, rows: Storages) -> Ints:
        self._storages.append(rows)
        self._next_storage += len(rows)
        return np.arange(self._next_storage - len(rows), self._next_storage)

    def use(self, op: int, storage: int, role: str) -> None:
        """Adds a use."""
        self._uses.append((op, storage, role))

    def free(self, storage: int, after: int) -> None:
        """Frees an added storage after an operator."""
        self._freed_after[storage] = after

    def redirect(self, new_of: Ints, until: Ints) -> None:
        """Redirects operators after the given ones to another storage. Shape (storages,) each."""
        uses = self.draft.uses
        later = (new_of[uses.storage_id] != NONE) & (uses.op_id > until[uses.storage_id])
        self.draft.uses = uses.replace(storage_id=np.where(later, new_of[uses.storage_id], uses.storage_id))

    def last_free(self, members: Ints) -> int:
        """Returns the operator after which the last of the given storages is freed, NONE if one outlives the step."""
        freed = self.step.storages.freed_op_id[members]
        return NONE if (freed == NONE).any() else int(freed.max())


class Timeline:
    """Two streams: the operators of the step, and concurrent collectives in sequence.

    A collective begins after the preceding operator and the preceding collective. The operator that needs it
    waits.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._sent: list[tuple[int, int, float]] = []

    def send(self, before: int, duration_us: float, needed_at: int) -> None:
        """Adds a collective.

        Args:
            before: Operator of the step before which it is sent.
            duration_us: Its duration.
            needed_at: Operator of the step that waits for it.
        """
        self._sent.append((before, needed_at, duration_us))

    def duration_us(self, durations_us: Floats) -> float:
        """Returns the duration of the step.

        Args:
            durations_us: Of the step's own operators, without the collectives. Shape (ops,).
        """
        recorded = float(np.nansum(self._step.ops.duration_us))
        factor = self._step.duration_us / recorded if recorded else 1.0
        ends = np.concatenate([[0.0], np.cumsum(np.nan_to_num(durations_us))]) * factor
        delay, free = 0.0, 0.0
        waiting: list[tuple[int, float]] = []
        for before, needed_at, duration in sorted(self._sent, key=lambda sent: sent[0]):
            # Those needed up to here have already delayed the computation.
            for place, arrives in sorted(each for each in waiting if each[0] <= before):
                delay = max(delay, arrives - float(ends[place]))
            waiting = [each for each in waiting if each[0] > before]
            free = max(free, float(ends[before]) + delay) + duration
            waiting.append((needed_at, free))
        for place, arrives in sorted(waiting):
            delay = max(delay, arrives - float(ends[place]))
        return float(ends[-1]) + delay
