"""Inserts operators of optimizer updates into a step, with what they allocate and how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memprof.policies.optimizer.recognise import Update
from memprof.policies.rewrite.insertion import Insertion
from memprof.trace.schema import NONE
from memprof.trace.step import Step

#: A Python number passed to an operator is wrapped in an 8-byte tensor, then cast to a 4-byte one inside the operator.
_NUMBER_BYTES, _CAST_BYTES = 8, 4
#: Bytes of the same temporaries in the slow path of a foreach operator on the CPU, all inside the operator.
_FOREACH_NUMBER_BYTES = 12


class UpdateOperators:
    """Inserts operators that update parameters, one after another."""

    def __init__(self, insertion: Insertion, step: Step, launch_us: float, us_per_byte: float) -> None:
        """Stores the insertion point and the cost of an operator: its launch and its bytes."""
        self.insertion = insertion
        self._sizes: list[int] = step.storages.allocated_bytes.tolist()
        self._shapes, self.dtypes = step.storages.shape, step.storages.dtype
        self._is_cpu = bool((step.storages.device[step.storages.category == "parameter"] == "cpu").all())
        self._launch_us = launch_us
        self._us_per_byte = us_per_byte
        self._like = self._before = 0
        self._module_id = NONE
        self._held = NONE
        self._replaced: dict[int, int] = {}

    def begin(self, *, like: int, before: int, module_id: int, replaced: dict[int, int]) -> None:
        """Begins one call of an optimizer.

        Args:
            like: Operator of the step whose phase and place the new ones copy.
            before: Operator before which they run.
            module_id: Module they are attributed to.
            replaced: Substitute storages by original: state copied from the host.
        """
        self._like, self._before, self._module_id = like, before, module_id
        self._replaced = replaced
        self._held = NONE

    def end(self) -> int:
        """Ends the call, which frees what its variables hold; returns its last operator."""
        last = self.insertion.next_op - 1
        if self._held != NONE:
            self.insertion.free(self._held, last)
        return last

    def operator(
        self,
        name: str,
        mutates: Iterable[int] = (),
        reads: Iterable[int] = (),
        *,
        makes_like: Sequence[int] = (),
        number: bool = False,
        tensors: int = 1,
    ) -> list[int]:
        """Emits one operator; returns the storages it allocates, each the size of one of ``makes_like``."""
        insertion = self.insertion
        mutates, reads = list(mutates), list(reads)
        is_foreach = "_foreach_" in name
        makes = list(range(insertion.next_storage, insertion.next_storage + len(makes_like)))
        sizes = list(map(self._size, makes_like))
        touched = sum(map(self._size, mutates)) + sum(map(self._size, reads)) + sum(sizes)
        launches = tensors if is_foreach and self._is_cpu else 1  # on the CPU foreach loops internally
        op = insertion.op(
            f"aten.{name}",
            like=self._like,
            before=self._before,
            mutates=mutates,
            reads=reads,
            writes=makes,
            duration_us=self._launch_us * launches + self._us_per_byte * touched,
            workspace_bytes=(_FOREACH_NUMBER_BYTES if is_foreach else _CAST_BYTES) if number and self._is_cpu else 0,
            module_id=self._module_id,
        )
        for size, model in zip(sizes, makes_like, strict=True):
            known = model < len(self._shapes)
            shape, dtype = (str(self._shapes[model]), str(self.dtypes[model])) if known else ("", "")
            insertion.storage(size, op, shape=shape, dtype=dtype)
        if number and self._is_cpu and not is_foreach:
            insertion.storage(_NUMBER_BYTES, op, op)
        return makes

    def _size(self, storage: int) -> int:
        # New storages are as large as their model; the size is only used for traffic, so parameters suffice.
        return self._sizes[storage] if storage < len(self._sizes) else 0

    def state(self, update: Update, key: str) -> int:
        """Returns a storage of an update's state, or the one that stands for it."""
        storage = update.storages[key]
        return self._replaced.get(storage, storage)

    def free(self, storages: Iterable[int]) -> None:
        """Frees storages after the last operator inserted."""
        for storage in storages:
            self.insertion.free(storage, self.insertion.next_op - 1)

    def hold(self, storage: int) -> None:
        """Notes that a variable of the loop is bound to a storage, which frees the one of the parameter before."""
        if self._held != NONE:
            self.free([self._held])
        self._held = storage
