"""Rewrites a single-rank step into the step of one rank of many."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.scale import scale_step
from memprof.policies.rewrite.draft import Draft
from memprof.policies.shard.division import buckets, find_units
from memprof.policies.shard.predicted_full import Fully
from memprof.policies.shard.predicted_sharding import Sharding
from memprof.trace.operator_facts import COPY, EMPTY
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.shard.policy import Shard


def transform(step: Step, policy: Shard) -> Step:
    """Shards what the stage shards, and adds the collectives, concurrent with the computation.

    In stages 0 and 1 each gradient moves into a bucket when it is complete, and the buckets are sent while backward
    runs; in stage 1 the ranks exchange their results after the update. In stages 2 and 3 a unit's parameters are
    gathered into one buffer and copied from there, and its gradients are copied into one buffer and scattered, at the
    same points as in torch's fully_shard. A single rank is predicted as recorded.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", for the
    stages; Zhao et al. 2023, "PyTorch FSDP", for units and prefetch; timing and buffers as in
    torch.distributed.fsdp.fully_shard of torch 2.13.

    Raises:
        PolicyError: A unit's pattern matches no module, or the batch cannot be split.
    """
    units = find_units(step, policy.units)
    if policy.world_size == 1:
        return step
    if policy.batch == "split":
        # Everything that grows with the batch is scaled to the largest part of any rank.
        batch = find_batch(step)
        size = int(part_sizes(batch.size, policy.world_size)[0])
        scaled = scale_step(step, batch, size, np.isin(step.ops.phase, ("forward", "backward")))
        draft = Draft(step)
        draft.ops, draft.storages = scaled.ops(), scaled.storages()
        draft.duration_us = scaled.duration_us(draft.ops)
        step = dataclasses.replace(draft.build(), number=step.number)
    built = Fully(step, policy, units) if policy.stage >= 2 else Replicated(step, policy)
    return built.build()


class Replicated(Sharding):
    """A step of a rank that holds all parameters."""

    def build(self) -> Step:
        """Moves gradients into buckets; in stage 1 also shards the update and exchanges its results."""
        if self.policy.stage == 1:
            self.divide_update()
        self._average()
        if self.policy.stage == 1:
            self._exchange()
        return self.finish()

    def _average(self) -> None:
        """Copies each gradient into its bucket, which has the same lifetime; a single gradient is its own bucket."""
        storages = self.step.storages
        freed = storages.freed_op_id.copy()
        bucket_of = np.full(len(storages), NONE, dtype=np.int64)
        moved_at = np.full(len(storages), NONE, dtype=np.int64)
        for group in buckets(self.kept_at, storages.requested_bytes, self.policy.bucket_mib):
            full = int(self.kept_at[group].max())
            bytes_ = int(storages.requested_bytes[group].sum())
            bucket = group
            if len(group) > 1:
                bucket, freed[group] = self._fill(group)
                bucket_of[group], moved_at[group] = bucket, self.kept_at[group]
            op = self.collective(
                "c10d.allreduce_",
                full + 1,
                self.ring.all_reduce_us(bytes_),
                bytes_,
                needed_at=self.update_begins,
                like=full,
            )
            for gradient in bucket.tolist():
                self.use(op, gradient, "mutate")
        self.draft.storages = self.draft.storages.replace(freed_op_id=freed)
        self.redirect(bucket_of, moved_at)

    def _fill(self, group: Ints) -> tuple[Ints, list[int]]:
        """Returns the gradients in their bucket, and the operators that copy them into it."""
        copies = [self.operator(COPY, at + 1, at, mutates=True) for at in self.kept_at[group].tolist()]
        bucket = self.gradients(group, self.step.storages.requested_bytes[group], copies[0])
        for op, gradient, inside in zip(copies, group.tolist(), bucket.tolist(), strict=True):
            self.use(op, gradient, "read")
            self.use(op, inside, "mutate")
        return bucket, copies

    def _exchange(self) -> None:
        """Gathers the ranks' updates, some parameters at a time, through a buffer."""
        step, end = self.step, len(self.step.ops)
        optimizer = np.flatnonzero(step.ops.phase == "optimizer")
        last = int(optimizer[-1]) if len(optimizer) else end - 1
        trained = np.flatnonzero(self.is_parameter & np.isin(step.storages.name, step.storages.name[self.is_gradient]))
        whole = self.part_bytes * self.policy.world_size
        place = np.full(len(step.storages), NONE, dtype=np.int64)
        place[trained] = np.arange(len(trained))
        for group in buckets(place, step.storages.requested_bytes, self.policy.bucket_mib):
            bytes_ = int(whole[group].sum())
            empty = self.operator(EMPTY, last + 1, last)
            buffer = self.storage(bytes_, empty)
            op = self.collective(
                "c10d._allgather_base_",
                last + 1,
                self.ring.all_gather_us(bytes_),
                bytes_,
                needed_at=last + 1,
                like=last,
            )
            copy = self.operator(COPY, last + 1, last, mutates=True)
            self.use(op, buffer, "mutate")
            self.use(copy, buffer, "read")
            for parameter in group.tolist():
                self.use(copy, parameter, "mutate")
            self.free(buffer, copy)
