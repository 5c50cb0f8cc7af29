"""One training iteration, its invariants, and what its operators write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.errors import InvariantError
from memprof.trace.schema import NONE, Bools, Ints, Memory, ModuleCalls, Modules, Ops, Saved, Stacks, Storages, Uses
from memprof.trace.usages import OptimizerTraits


@dataclass(frozen=True, eq=False)
class Step:
    """The tables of one step. Ids are row numbers of this step's own tables.

    Only ``module_id`` and ``stack_id`` are the trace's; a step holds the trace's full ``modules`` and ``stacks``. An id
    that points outside the step (a storage alive before it, an operator of another step) is ``NONE``.

    Attributes:
        number: The step's number in the job.
        duration_us: Duration without the recorder if the trace has an uninstrumented step, else as recorded.
        modules: Every module of the job.
        module_calls: Calls within the step.
        stacks: Every Python stack of the trace.
        ops: Operators of the step; ``op_id`` is the row.
        storages: Storages alive in any part of the step, in order of birth; ``storage_id`` is the row.
            ``created_op_id`` is ``NONE`` for those alive when it starts, ``freed_op_id`` for those that outlive it.
        uses: Which operator uses which storage.
        saved: What forward saves for backward.
        memory: The allocator's counters as recorded; without rows in a predicted step.
        first_op_id: The trace's id of the step's first operator.
        storage_ids: The trace's storage id of each row of ``storages``.
        to_host_bytes_per_us: Copy speed from its device to host memory; 0 where not measured.
        from_host_bytes_per_us: The same in the other direction.
        product_flops_per_us: FLOPs of its matrix products in float32 and in a short type; 0 where not known.
        short_types: Types shorter than float32 that the device it ran on computes in; on a CPU, oneDNN.
        planned_types: The same of the GPU that it is planned for, where it ran on a CPU; None for no other machine.
        allocator_settings: ``PYTORCH_ALLOC_CONF`` as the job had it.
        size_errors: Error of the predicted peak, below and above, as a share of what the step allocates, where the step
            was scaled to a size that was not recorded.
        undivided: Why the job's batches cannot be split into micro-batches, a clause; "" where that is unknown.
        optimizers: The optimizers that update in the recorded steps; none in recordings of older versions.
        usages: What the job does in the recorded steps that no operator shows, by the names of ``usages.py``.
        trained_modules: Modules whose parameters have gradients in any recorded step of the job; a step that only
            evaluates has none of its own.
    """

    number: int
    duration_us: float
    modules: Modules
    module_calls: ModuleCalls
    stacks: Stacks
    ops: Ops
    storages: Storages
    uses: Uses
    saved: Saved
    memory: Memory
    first_op_id: int
    storage_ids: Ints
    to_host_bytes_per_us: float = 0.0
    from_host_bytes_per_us: float = 0.0
    product_flops_per_us: tuple[float, float] = (0.0, 0.0)
    short_types: tuple[str, ...] = ("bfloat16",)
    planned_types: tuple[str, ...] | None = None
    allocator_settings: str = ""
    size_errors: tuple[float, float] = (0.0, 0.0)
    undivided: str = ""
    optimizers: tuple[OptimizerTraits, ...] = ()
    usages: frozenset[str] = frozenset()
    trained_modules: tuple[int, ...] = ()

    def bytes_at_start(self) -> int:
        """Returns the allocated bytes alive before the first operator."""
        return int(self.storages.allocated_bytes[self.storages.created_op_id == NONE].sum())

    def is_on_device(self) -> bool:
        """Returns whether it ran on a device with memory of its own."""
        return bool(np.any(~np.isin(self.storages.device, ("cpu", ""))))

    def targets_device(self) -> bool:
        """Returns whether it ran on, or is planned for, a device with memory of its own."""
        return self.planned_types is not None or self.is_on_device()

    def runs_bf16(self) -> bool:
        """Returns whether the device that it ran on, or is planned for, supports bfloat16, as every CPU does."""
        if self.planned_types is not None:
            return "bfloat16" in self.planned_types
        return not self.is_on_device() or "bfloat16" in self.short_types

    def born_bytes(self) -> Ints:
        """Returns the allocated bytes of the storages each operator creates, shape ``(ops,)``."""
        return sum_at(self.storages.created_op_id, self.storages.allocated_bytes, len(self.ops))

    def freed_bytes(self) -> Ints:
        """Returns the allocated bytes freed after each operator and before the next, shape ``(ops,)``."""
        return sum_at(self.storages.freed_op_id, self.storages.allocated_bytes, len(self.ops))

    def check(self) -> None:
        """Verifies the invariants of every step.

        Ids are dense and resolvable, storages are in order of birth, freed no earlier than created and used only while
        alive, and replaying allocations and frees gives the recorded counters at every operator that has one.

        Raises:
            InvariantError: Names the first invariant that is violated.
        """
        self.check_lives()
        self._check_counters()

    def check_lives(self) -> None:
        """Verifies the invariants of a step of any recording, except its counters: ``check`` without these.

        Raises:
            InvariantError: Names the first invariant that is violated.
        """
        self._check_ids()
        self._check_order()

    def _check_ids(self) -> None:
        dense = {
            "operators": self.ops.op_id,
            "storages": self.storages.storage_id,
            "modules": self.modules.module_id,
            "module calls": self.module_calls.module_call_id,
            "stacks": self.stacks.stack_id,
        }
        for what, ids in dense.items():
            self._require(ids == np.arange(len(ids)), f"the {what} are not numbered 0, 1, 2 ...: row {{row}}")
        ops, storages, modules = len(self.ops), len(self.storages), len(self.modules)
        optional = {
            "operator {row} is of a module": (self.ops.module_id, modules),
            "operator {row} belongs to a forward operator": (self.ops.forward_op_id, ops),
            "operator {row} has a stack": (self.ops.stack_id, len(self.stacks)),
            "storage {row} is of a module": (self.storages.module_id, modules),
            "storage {row} is made by an operator": (self.storages.created_op_id, ops),
            "storage {row} is freed after an operator": (self.storages.freed_op_id, ops),
            "saved row {row} is of a module": (self.saved.module_id, modules),
            "saved row {row} is released by an operator": (self.saved.released_op_id, ops),
            "module {row} has a parent": (self.modules.parent_id, modules),
            "module call {row} has a parent": (self.module_calls.parent_call_id, len(self.module_calls)),
            "module call {row} starts with an operator": (self.module_calls.first_op_id, ops),
            "module call {row} ends with an operator": (self.module_calls.last_op_id, ops),
        }
        for what, (ids, count) in optional.items():
            self._require((ids >= NONE) & (ids < count), f"{what} that does not exist")
        needed = {
            "use {row} is by an operator": (self.uses.op_id, ops),
            "use {row} is of a storage": (self.uses.storage_id, storages),
            "saved row {row} is of a storage": (self.saved.storage_id, storages),
            "saved row {row} is by an operator": (self.saved.forward_op_id, ops),
            "module call {row} is of a module": (self.module_calls.module_id, modules),
            "counter sample {row} is of an operator": (self.memory.op_id, ops),
        }
        for what, (ids, count) in needed.items():
            self._require((ids >= 0) & (ids < count), f"{what} that does not exist")
        self._require(self.ops.forward_op_id < self.ops.op_id, "operator {row} belongs to a forward operator after it")

    def _check_order(self) -> None:
        created, freed = self.storages.created_op_id, self.storages.freed_op_id
        self._require(self.storages.allocated_bytes >= 0, "storage {row} has fewer than 0 bytes")
        self._require(created[1:] >= created[:-1], "the storages are not in order of birth: row {row} and the next")
        self._require((freed == NONE) | (freed >= created), "storage {row} is freed before it is made")
        self._require_alive(self.uses.storage_id, self.uses.op_id, "use {row} is of a storage")
        self._require_alive(self.saved.storage_id, self.saved.forward_op_id, "saved row {row} is of a storage")
        released = self.saved.released_op_id != NONE
        self._require_alive(
            self.saved.storage_id[released], self.saved.released_op_id[released], "released row {row} is of a storage"
        )

    def _check_counters(self) -> None:
        born = self.born_bytes()
        highest = self.bytes_at_start() + np.cumsum(born) - _before(np.cumsum(self.freed_bytes()))
        highest += self.ops.workspace_bytes
        # An operator has one sample per device; here its storages are summed over devices too.
        counted = sum_at(self.memory.op_id, self.memory.allocated_bytes, len(self.ops))
        sampled = np.zeros(len(self.ops), dtype=np.bool_)
        sampled[self.memory.op_id] = True
        wrong = np.flatnonzero(sampled & (counted != highest))
        if len(wrong):
            row = wrong[0]
            raise InvariantError(
                f"step {self.number} is inconsistent: at operator {row} ({self.ops.name[row]}) the replay holds "
                f"{highest[row]} bytes and the allocator counted {counted[row]}."
            )

    def _require_alive(self, storage_ids: Ints, op_ids: Ints, what: str) -> None:
        created, freed = self.storages.created_op_id[storage_ids], self.storages.freed_op_id[storage_ids]
        self._require((created <= op_ids) & ((freed == NONE) | (freed >= op_ids)), f"{what} that is not alive then")

    def _require(self, holds: Bools, broken: str) -> None:
        """Raises the message for the first row that violates the condition."""
        if not holds.all():
            raise InvariantError(
                f"step {self.number} is inconsistent: {broken.format(row=int(np.flatnonzero(~holds)[0]))}."
            )


def sum_at(op_ids: Ints, values: Ints, ops: int) -> Ints:
    """Sums integers by operator, exactly.

    Args:
        op_ids: The operator of each value; ``NONE`` entries are skipped.
        values: The values to sum, as long as ``op_ids``.
        ops: Number of operators.

    Returns:
        The sums, shape ``(ops,)``.
    """
    sums = np.zeros(ops + 1, dtype=np.int64)  # NONE, -1, indexes the last entry
    # Not numpy.bincount: its weights are floats, which lose bytes above 2**53.
    np.add.at(sums, op_ids, values)
    return sums[:-1]


def rows_of(column: Ints, ids: Ints) -> tuple[Ints, Ints]:
    """Finds the rows of a sorted column that hold each of some ids, grouped by id.

    Returns:
        The rows, and how many there are of each id, shape ``(ids,)``.
    """
    low = np.searchsorted(column, ids)
    times = np.searchsorted(column, ids, side="right") - low
    ends = np.cumsum(times)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - times, times)
    return np.repeat(low, times) + within, times


def _before(sums: Ints) -> Ints:
    """Returns the running sum before each operator."""
    return np.concatenate(([0], sums[:-1])) if len(sums) else sums


def largest_written(ops: Ops, storages: Storages, uses: Uses) -> Ints:
    """Returns the row of the largest storage that each operator makes or changes, NONE for none, shape ``(ops,)``."""
    written = np.flatnonzero(uses.role != "read")
    order = written[np.argsort(storages.requested_bytes[uses.storage_id[written]], kind="stable")]
    largest: Ints = np.full(len(ops), NONE, dtype=np.int64)
    largest[uses.op_id[order]] = uses.storage_id[order]  # the last one written is the largest
    return largest
