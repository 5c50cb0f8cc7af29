"""Rewrites a step of one rank that had everything into the step of one rank of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.draft import Draft
from memprof.policies.shard.additions import Additions
from memprof.policies.shard.parts import buckets, complete_at, largest_parts, unit_groups
from memprof.policies.shard.ring import Ring
from memprof.policies.shard.timeline import Timeline
from memprof.policies.shard.units import ROOT, Units, find_units
from memprof.replay.rounding import rounded_on_cuda
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.shard.policy import Shard

#: What gathers a unit's parameters.
_GATHER = "c10d._allgather_base_"


def transform_shard(step: Step, policy: Shard) -> Step:
    """Divides what the stage divides, adds the collectives, and lets them run beside the computation.

    Stages 0 and 1 keep gradients in buckets that live as long as the job; each gradient is copied into its bucket
    when it is there. Stage 2 keeps the gradients of a bucket until it is reduced and scattered, stage 3 those of a
    unit. In stage 3 a unit's parameters are gathered while the unit before is at work, into one buffer, and copied
    from there. A single rank is predicted as what was recorded.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", for what
    is divided; Zhao et al. 2023, "PyTorch FSDP", for units, prefetch and division along the first dimension, which
    rounds up.

    Raises:
        PolicyError: A unit's pattern matches no module.
    """
    units = find_units(step, policy.units)
    if policy.world_size == 1:
        return step
    return _Sharding(step, policy, units).build()


class _Sharding:
    """One step on its way to a rank's."""

    def __init__(self, step: Step, policy: Shard, units: Units) -> None:
        self.step, self.policy, self.units = step, policy, units
        self.draft = Draft(step)
        self.added = Additions(step)
        ring = Ring(policy.world_size, policy.link_gigabytes_per_second * 1e3, policy.link_latency_us)
        self.ring = ring
        self.is_cuda = bool(np.char.startswith(step.storages.device.astype(str), "cuda").any())
        phase = np.append(step.ops.phase, "older")
        storages = step.storages
        self.full_bytes = storages.allocated_bytes
        self.part_bytes = largest_parts(storages, policy.world_size, is_cuda=self.is_cuda)
        self.is_parameter = storages.category == "parameter"
        self.is_gradient = storages.category == "gradient"
        self.is_state = storages.category == "optimizer_state"
        self.is_born = storages.created_op_id != NONE
        self.is_update = phase[storages.created_op_id] == "optimizer"
        self.kept_at = complete_at(step, self.is_gradient & self.is_born)
        optimizer = np.flatnonzero(step.ops.phase == "optimizer")
        self.update_begins = int(optimizer[0]) if len(optimizer) else len(step.ops)
        self.timeline = Timeline(step)

    def build(self) -> Step:
        stage = self.policy.stage
        if stage >= 1:
            self._divide_state()
        if stage <= 1:
            self._fill_buckets()
        else:
            by_unit = self.units.of_storage if stage == 3 else None
            self._scatter_gradients(self._buckets() if by_unit is None else unit_groups(self.kept_at, by_unit))
        if stage == 3:
            self._divide_parameters()
        elif stage >= 1:
            whole = int(self.step.storages.requested_bytes[self.is_parameter].sum())
            end = len(self.step.ops)
            self._collective("c10d.allgather_", end, self.ring.all_gather_us(whole), whole, needed_at=end)
        self.draft.duration_us = self.timeline.duration_us(self.draft.ops.duration_us)
        self.added.insert(self.draft)
        return self.draft.build()

    def _divide_state(self) -> None:
        """Keeps a part of the optimizer's state, and of what it computes with while it updates."""
        step, storages = self.step, self.draft.storages
        # By number: comparing texts with texts takes long.
        texts, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
        like_parameters = np.isin(shape_of, shape_of[self.is_parameter]) & (texts != "")[shape_of]
        divided = self.is_state | (self.is_update & like_parameters)
        self._set_bytes(divided, self.part_bytes)
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

    def _fill_buckets(self) -> None:
        """Keeps gradients in buckets for good, sends each when it is full, and waits for all before the update."""
        storages = self.draft.storages
        before = self.is_gradient & ~self.is_born & (storages.freed_op_id != NONE)
        self.draft.storages = storages.replace(
            freed_op_id=np.where(self.kept_at != NONE, self.kept_at, storages.freed_op_id)
        )
        # The gradients of the step before lie in the same buckets.
        self.draft.remove_storages(np.flatnonzero(before))
        bucket_of = np.full(len(storages), NONE, dtype=np.int64)
        for group in self._buckets():
            bytes_ = int(storages.requested_bytes[group].sum())
            bucket = self.added.storage(self._storage(bytes_, NONE, NONE))
            bucket_of[group] = bucket
            op = self._collective(
                "c10d.allreduce_",
                int(self.kept_at[group].max()) + 1,
                self.ring.all_reduce_us(bytes_),
                bytes_,
                needed_at=self.update_begins,
            )
            self._use(op, bucket, "mutate")
        self._redirect(bucket_of, self.kept_at)

    def _scatter_gradients(self, groups: list[Ints]) -> None:
        """Keeps the full gradients of a group until all are there, then a part of each."""
        storages = self.draft.storages
        freed = storages.freed_op_id.copy()
        # Gradients that are older than the step are those of the update before: parts already.
        self._set_bytes(self.is_gradient & ~self.is_born, self.part_bytes)
        part_of = np.full(len(storages), NONE, dtype=np.int64)
        for group in groups:
            at = int(self.kept_at[group].max())
            bytes_ = int(storages.requested_bytes[group].sum())
            op = self._collective(
                "c10d._reduce_scatter_base_",
                at + 1,
                self.ring.reduce_scatter_us(bytes_),
                bytes_,
                needed_at=self.update_begins,
                # Its input, one buffer with all of the group, is a temporary of the operator.
                workspace_bytes=self._rounded(bytes_),
            )
            rows = self.step.storages.take(group)
            parts = rows.replace(
                requested_bytes=self.part_bytes[group],
                allocated_bytes=self.part_bytes[group],
                created_op_id=np.full(len(group), op),
                freed_op_id=np.where(rows.freed_op_id > at, rows.freed_op_id, NONE),
            )
            part_of[group] = self.added.storages(parts)
            # They are copied into the buffer, and gone while it is on its way.
            freed[group] = at
        category = np.where(part_of != NONE, "collective", self.draft.storages.category)
        self.draft.storages = self.draft.storages.replace(freed_op_id=freed, category=category)
        self._redirect(part_of, np.where(part_of != NONE, freed, NONE))

    def _divide_parameters(self) -> None:
        """Keeps a part of each parameter, and gathers a unit's parameters around its forward and its backward."""
        self._set_bytes(self.is_parameter, self.part_bytes)
        units, step = self.units, self.step
        bytes_ = np.zeros(units.count, dtype=np.int64)
        np.add.at(bytes_, units.of_storage[self.is_parameter], self.full_bytes[self.is_parameter])
        padded = np.zeros(units.count, dtype=np.int64)
        np.add.at(padded, units.of_storage[self.is_parameter], self.part_bytes[self.is_parameter])
        padded *= self.policy.world_size
        keeps = np.full(units.count, not self.policy.reshard_after_forward)
        keeps[ROOT] = True  # it would be gathered again at once: backward begins with it
        keeps |= units.first_backward == NONE
        end = np.where(keeps, np.maximum(units.last_forward, units.last_backward), units.last_forward)
        forward = self._gather(units.first_forward, end, bytes_, padded)
        again = np.where(keeps, NONE, units.first_backward)
        backward = self._gather(again, units.last_backward, bytes_, padded)

        uses, phase = self.draft.uses, step.ops.phase
        is_recorded = uses.storage_id < len(self.is_parameter)  # the others are of what was added
        unit = units.of_storage[np.where(is_recorded, uses.storage_id, 0)]
        is_forward, is_backward = ((phase == which)[uses.op_id] for which in ("forward", "backward"))
        whole = np.where(is_backward & (backward[unit] != NONE), backward[unit], forward[unit])
        until = np.where(is_backward, np.where(backward[unit] != NONE, units.last_backward[unit], end[unit]), end[unit])
        applies = is_recorded & self.is_parameter[np.where(is_recorded, uses.storage_id, 0)] & (whole != NONE)
        applies &= (is_forward | is_backward) & (uses.op_id <= until)
        self.draft.uses = uses.replace(storage_id=np.where(applies, whole, uses.storage_id))

    def _gather(self, first: Ints, last: Ints, bytes_: Ints, padded: Ints) -> Ints:
        """Gathers units in the order in which they begin, each while the one before is at work.

        Returns:
            The storage of each unit's parameters in the draft, NONE without. Shape (units,).
        """
        whole = np.full(len(first), NONE, dtype=np.int64)
        order = [int(unit) for unit in np.argsort(first, kind="stable") if first[unit] != NONE and bytes_[unit]]
        arrived: dict[int, int] = {}

        def send(unit: int, before: int) -> None:
            duration = self.ring.all_gather_us(int(padded[unit]))
            op = self._collective(_GATHER, before, duration, int(padded[unit]), needed_at=int(first[unit]))
            arrived[unit] = self.added.storage(self._storage(int(padded[unit]), op, NONE))
            self._use(op, arrived[unit], "write")

        for place, unit in enumerate(order):
            begins = int(first[unit])
            if place == 0:
                send(unit, begins)
            copy = self.added.operator("fsdp.split_with_sizes_copy", begins, begins)
            ends = max(int(last[unit]), begins)
            whole[unit] = self.added.storage(self._storage(int(bytes_[unit]), copy, ends))
            self.added.free(arrived[unit], copy)
            self._use(copy, arrived[unit], "read")
            self._use(copy, int(whole[unit]), "write")
            if place + 1 < len(order):
                send(order[place + 1], begins)
        return whole

    def _buckets(self) -> list[Ints]:
        return buckets(self.kept_at, self.step.storages.requested_bytes, self.policy.bucket_mib)

    def _collective(
        self, name: str, before: int, duration_us: float, bytes_: int, *, needed_at: int, workspace_bytes: int = 0
    ) -> int:
        self.timeline.send(before, duration_us, needed_at)
        # What is sent when it is complete belongs to what completed it; what is fetched, to what needs it.
        like = before if name == _GATHER else before - 1
        return self.added.operator(
            name,
            before,
            max(like, 0),
            kind="collective",
            stream=1,
            duration_us=duration_us,
            read_bytes=bytes_,
            written_bytes=bytes_,
            workspace_bytes=workspace_bytes,
        )

    def _storage(self, bytes_: int, created: int, freed: int) -> Storages:
        devices = self.step.storages.device[self.is_parameter]
        return Storages.of(
            storage_id=[0],
            category=["collective"],
            device=[devices[0] if len(devices) else "cpu"],
            requested_bytes=[bytes_],
            allocated_bytes=[self._rounded(bytes_)],
            created_op_id=[created],
            freed_op_id=[freed],
        )

    def _use(self, op: int, storage: int, role: str) -> None:
        self.added.use(op, storage, role)

    def _redirect(self, new_of: Ints, until: Ints) -> None:
        """Lets operators after the one given touch another storage instead."""
        uses = self.draft.uses
        later = (new_of[uses.storage_id] != NONE) & (uses.op_id > until[uses.storage_id])
        self.draft.uses = uses.replace(storage_id=np.where(later, new_of[uses.storage_id], uses.storage_id))

    def _set_bytes(self, chosen: Bools, bytes_: Ints) -> None:
        storages = self.draft.storages
        self.draft.storages = storages.replace(
            requested_bytes=np.where(chosen, bytes_, storages.requested_bytes),
            allocated_bytes=np.where(chosen & (storages.allocated_bytes > 0), bytes_, storages.allocated_bytes),
        )

    def _rounded(self, bytes_: int) -> int:
        return rounded_on_cuda(bytes_) if self.is_cuda else bytes_
