"""Stages 2 and 3 on a recorded step: gathers and scatters units when fully_shard does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.shard.division import ROOT
from memprof.policies.shard.predicted_sharding import Sharding
from memprof.trace.operator_facts import EMPTY
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.shard.division import Units
    from memprof.policies.shard.policy import Shard

_GATHER, _SCATTER = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
#: Order before the same operator of the step: a unit's gradients are scattered before the next unit is gathered.
_AFTER, _BEFORE = 0, 1


class Fully(Sharding):
    """A step of a rank that holds a part of each parameter."""

    def __init__(self, step: Step, policy: Shard, units: Units) -> None:
        super().__init__(step, policy)
        self.units = units
        # torch gathers the parts of all ranks, with the last ones padded.
        padded = self.part_bytes * policy.world_size
        self.unit_bytes = self._by_unit(self.is_parameter, padded)
        # From here on all events are collected first, then added in execution order.
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._unscattered = NONE  # the buffer scattered last
        self._gathered = NONE  # the buffer gathered last

    def build(self) -> Step:
        """Shards everything, gathers units around their forward and backward, and scatters their gradients."""
        self.divide_update()
        self.set_part(self.is_parameter)
        self.set_part(self.is_gradient & ~self.is_born)
        self._gather_forward()
        self._gather_backward()
        self._scatter()
        for _, _, add in sorted(self._events, key=lambda event: event[:2]):
            add()
        return self.finish()

    def _is_kept(self) -> Bools:
        """Returns which units stay gathered after forward: backward begins with the root's."""
        keeps = np.full(self.units.count, self.policy.stage == 2 or not self.policy.reshard_after_forward)
        keeps[ROOT] = True
        return keeps

    def _gather_forward(self) -> None:
        """Gathers each unit before its forward. A buffer lives until the next unit has been copied out of its own."""
        units, keeps = self.units, self._is_kept()
        order = [unit for unit in self._order(units.first_forward) if self.unit_bytes[unit]]
        ends = np.where(keeps, np.maximum(units.last_forward, units.last_backward), units.last_forward)
        for place, unit in enumerate(order):
            first = int(units.first_forward[unit])
            # On a device the unit is requested while the previous one runs; gloo's ranks wait for it.
            sent_at = int(units.first_forward[order[max(place - 1, 0)]]) if self.is_cuda else first

            def add(unit: int = unit, first: int = first, sent_at: int = sent_at) -> None:
                buffer = self._receive(unit, first, sent_at, needed_at=first)
                copy = self._copy_out(unit, buffer, first, int(ends[unit]))
                if self._gathered != NONE:
                    self.free(self._gathered, copy)
                self._gathered = buffer

            self._events.append((first, _BEFORE, add))
        if order:
            last = max(int(units.last_forward[unit]) for unit in order)
            self._events.append((last + 1, _AFTER, lambda: self.free(self._gathered, last)))

    def _gather_backward(self) -> None:
        """Gathers the units freed after forward again, each while the previous one runs."""
        units, keeps = self.units, self._is_kept()
        again = np.where(keeps, NONE, units.first_backward)
        order = [unit for unit in self._order(again) if self.unit_bytes[unit]]
        begins = units.first_backward[units.first_backward != NONE]
        arrived: dict[int, int] = {}
        for place, unit in enumerate(order):
            first = int(units.first_backward[unit])
            # The first is requested when backward enters the model, each other when the previous one begins.
            sent_at = int(units.first_backward[order[place - 1]]) if place else int(begins.min())

            def send(unit: int = unit, first: int = first, sent_at: int = sent_at) -> None:
                arrived[unit] = self._receive(unit, sent_at, sent_at, needed_at=first)

            def take(unit: int = unit, first: int = first) -> None:
                copy = self._copy_out(unit, arrived[unit], first, int(units.last_backward[unit]))
                self.free(arrived[unit], copy)

            # At one operator a unit is copied out first, then the next is requested.
            self._events.append((sent_at, _BEFORE + 1, send))
            self._events.append((first, _BEFORE, take) if place or sent_at < first else (first, _BEFORE + 2, take))

    def _receive(self, unit: int, before: int, sent_at: int, *, needed_at: int) -> int:
        """Adds the all-gather of a unit; returns its buffer."""
        bytes_ = int(self.unit_bytes[unit])
        empty = self.operator(EMPTY, before, before)
        buffer = self.storage(bytes_, empty)
        op = self.collective(
            _GATHER,
            before,
            self.ring.all_gather_us(bytes_),
            bytes_,
            needed_at=needed_at,
            like=before,
            sent_at=sent_at,
        )
        self.use(op, buffer, "mutate")
        return buffer

    def _copy_out(self, unit: int, buffer: int, before: int, ends: int) -> int:
        """Adds the unit's whole parameters, copied from the buffer; returns the copy operator.

        Operators of the step still use the parts, so that recomputing them does not recompute the whole parameters.
        """
        copy = self.operator("fsdp.split_with_sizes_copy.default", before, before, mutates=True)
        whole = self.storage(int(self.unit_bytes[unit]), copy, max(ends, before))
        self.use(copy, buffer, "read")
        self.use(copy, whole, "mutate")
        return copy

    def _scatter(self) -> None:
        """Copies a unit's gradients into a buffer at the end of its backward, and keeps a part of the sums.

        A buffer lives until the end of the next unit's backward.

        Raises:
            PolicyError: An optimizer reads gradients before the end of that backward.
        """
        storages = self.draft.storages
        self._freed = storages.freed_op_id.copy()
        self._part_of = np.full(len(storages), NONE, dtype=np.int64)
        backward = np.flatnonzero(self.step.ops.phase == "backward")
        uses = self.step.uses
        is_update = self.step.ops.phase[uses.op_id] == "optimizer"
        read_at = np.full(len(storages), len(self.step.ops), dtype=np.int64)
        np.minimum.at(read_at, uses.storage_id[is_update], uses.op_id[is_update])
        made = np.flatnonzero(self.kept_at != NONE)
        unit_of = self.units.of_storage[made]
        groups = [(unit, made[unit_of == unit]) for unit in np.unique(unit_of).tolist()]
        # The root's own parameters are scattered at the end of backward.
        for unit, group in sorted(groups, key=lambda pair: (pair[0] == ROOT, self.kept_at[pair[1]].max())):
            at = int(backward[-1] if unit == ROOT else max(self.kept_at[group].max(), self.units.last_backward[unit]))
            if read_at[group].min() <= at:
                raise PolicyError(
                    "the job runs backward again after an update, as with several models and optimizers; sharding of "
                    "parameters and gradients can only be predicted for one update after all of backward. "
                    "Use ddp or zero1."
                )
            self._events.append((at + 1, _AFTER, partial(self._scatter_unit, group, at)))

        def end() -> None:
            if self._unscattered != NONE:
                self.free(self._unscattered, self._scattered_by)
            self.draft.storages = self.draft.storages.replace(freed_op_id=self._freed)
            self.redirect(self._part_of, np.where(self._part_of != NONE, self._freed_at, NONE))

        self._freed_at = self.kept_at
        self._scattered_by = self._scattered_at = NONE
        self._events.append((len(self.step.ops) + 1, _AFTER, end))

    def _scatter_unit(self, group: Ints, at: int) -> None:
        if self._unscattered != NONE:
            self.free(self._unscattered, at if self._scattered_at < at else self._scattered_by)
        bytes_ = int(self.part_bytes[group].sum())
        padded = bytes_ * self.policy.world_size
        copy = self.operator("fsdp.chunk_cat.default", at + 1, at, mutates=True)
        buffer = self.storage(padded, copy)
        op = self.collective(
            _SCATTER,
            at + 1,
            self.ring.reduce_scatter_us(padded),
            padded,
            needed_at=self.update_begins,
            like=at,
        )
        parts = self.gradients(group, self.part_bytes[group], op)
        for gradient, part in zip(group.tolist(), parts.tolist(), strict=True):
            self.use(copy, gradient, "read")
            self.use(op, part, "write")
        self.use(copy, buffer, "mutate")
        self.use(op, buffer, "read")
        self._freed[group] = copy
        self._part_of[group] = parts
        self._unscattered, self._scattered_by, self._scattered_at = buffer, op, at

    def _order(self, first: Ints) -> list[int]:
        return [int(unit) for unit in np.argsort(first, kind="stable") if first[unit] != NONE]

    def _by_unit(self, chosen: Bools, bytes_: Ints) -> Ints:
        sums = np.zeros(self.units.count, dtype=np.int64)
        np.add.at(sums, self.units.of_storage[chosen], bytes_[chosen])
        return sums
