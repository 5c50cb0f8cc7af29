"""Emits the operators with which torch's Adam, AdamW and SGD update parameters: loop, foreach or fused.

Each form matches torch/optim/adam.py and sgd.py (torch 2.13), operator by operator. The loop needs two or three
temporaries the size of the largest parameter; foreach the same number the size of all parameters; fused none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memprof.policies.optimizer.recognise import GRADIENT, PARAMETER, Update
from memprof.policies.rewrite.insertion import Insertion
from memprof.trace.schema import NONE
from memprof.trace.step import Step

#: A Python number passed to an operator is wrapped in an 8-byte tensor, then cast to a 4-byte one inside the operator.
_NUMBER_BYTES, _CAST_BYTES = 8, 4
#: Bytes of the same temporaries in the slow path of a foreach operator on the CPU, all inside the operator.
_FOREACH_NUMBER_BYTES = 12


class FormWriter:
    """Emits the updates of several parameters as one optimizer call would run them."""

    def __init__(self, insertion: Insertion, step: Step, algorithm: str, launch_us: float, us_per_byte: float) -> None:
        """Stores the insertion point and the cost of an operator: its launch and its bytes."""
        self._insertion = insertion
        self._sizes: list[int] = step.storages.allocated_bytes.tolist()
        self._shapes, self._dtypes = step.storages.shape, step.storages.dtype
        self._is_cpu = bool((step.storages.device[step.storages.category == "parameter"] == "cpu").all())
        self._algorithm = algorithm
        self._launch_us = launch_us
        self._us_per_byte = us_per_byte
        self._like = self._before = 0
        self._module_id = NONE
        self._old_denominator = NONE
        self._replaced: dict[int, int] = {}

    def write(
        self,
        form: str,
        updates: Sequence[Update],
        *,
        like: int,
        before: int,
        module_id: int = NONE,
        replaced: dict[int, int] | None = None,
    ) -> int:
        """Emits one call; returns its last operator.

        Args:
            form: loop, foreach or fused.
            updates: Updates to emit.
            like: Operator of the step whose phase and place the new ones copy.
            before: Operator before which they run.
            module_id: Module they are attributed to.
            replaced: Substitute storages by original: state copied from the host.
        """
        self._like, self._before, self._module_id = like, before, module_id
        self._replaced = replaced or {}
        self._old_denominator = NONE
        if form == "loop":
            for update in updates:
                (self._adam_loop if self._algorithm == "adam" else self._sgd_loop)(update)
        else:
            for together in _alike(updates, self._dtypes):
                if form == "fused":
                    self._fused(together)
                else:
                    (self._adam_foreach if self._algorithm == "adam" else self._sgd_foreach)(together)
        last = self._insertion.next_op - 1
        if self._old_denominator != NONE:
            self._insertion.free(self._old_denominator, last)
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
        insertion = self._insertion
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
            shape, dtype = (str(self._shapes[model]), str(self._dtypes[model])) if known else ("", "")
            insertion.storage(size, op, shape=shape, dtype=dtype)
        if number and self._is_cpu and not is_foreach:
            insertion.storage(_NUMBER_BYTES, op, op)
        return makes

    def _size(self, storage: int) -> int:
        # New storages are as large as their model; the size is only used for traffic, so parameters suffice.
        return self._sizes[storage] if storage < len(self._sizes) else 0

    def _of(self, update: Update, key: str) -> int:
        storage = update.storages[key]
        return self._replaced.get(storage, storage)

    def _free(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._insertion.free(storage, self._insertion.next_op - 1)

    def _adam_loop(self, update: Update) -> None:
        parameter, gradient = update.storages[PARAMETER], update.storages[GRADIENT]
        average, square = self._of(update, "exp_avg"), self._of(update, "exp_avg_sq")
        self.operator("add_.Tensor", [update.storages["step"]], number=True)
        decayed: list[int] = []
        if "decoupled" in update.traits:
            self.operator("mul_.Tensor", [parameter], number=True)
        if "coupled" in update.traits:
            decayed = self.operator("add.Tensor", reads=[gradient, parameter], makes_like=[parameter])
            gradient = decayed[0]
        self.operator("lerp_.Scalar", [average], [gradient])
        self.operator("mul_.Tensor", [square], number=True)
        self.operator("addcmul_.default", [square], [gradient])
        self.operator("_local_scalar_dense.default", reads=[update.storages["step"]])
        if "max_exp_avg_sq" in update.storages:
            highest = self._of(update, "max_exp_avg_sq")
            self.operator("maximum.out", [highest], [square])
            square = highest
        root = self.operator("sqrt.default", reads=[square], makes_like=[parameter])
        denominator = self.operator("div.Tensor", reads=root, makes_like=[parameter], number=True)
        self._free(root)
        self.operator("add_.Tensor", denominator, number=True)
        # Python rebinds the previous parameter's denominator here, which frees it.
        if self._old_denominator != NONE:
            self._free([self._old_denominator])
        self._old_denominator = denominator[0]
        self.operator("addcdiv_.default", [parameter], [average, *denominator])
        self._free(decayed)

    def _sgd_loop(self, update: Update) -> None:
        parameter, gradient = update.storages[PARAMETER], update.storages[GRADIENT]
        made: list[int] = []
        if "coupled" in update.traits:
            made = self.operator("add.Tensor", reads=[gradient, parameter], makes_like=[parameter])
            gradient = made[0]
        if "momentum_buffer" in update.storages:
            momentum = self._of(update, "momentum_buffer")
            self.operator("mul_.Tensor", [momentum], number=True)
            self.operator("add_.Tensor", [momentum], [gradient])
            if "nesterov" in update.traits:
                ahead = self.operator("add.Tensor", reads=[gradient, momentum], makes_like=[parameter])
                self._free(made)
                made, gradient = ahead, ahead[0]
            else:
                # Python rebinds the decayed gradient's name to the momentum, which frees the former.
                self._free(made)
                made, gradient = [], momentum
        self.operator("add_.Tensor", [parameter], [gradient])
        self._free(made)

    def _adam_foreach(self, updates: Sequence[Update]) -> None:
        parameters, gradients, count = _all(updates, PARAMETER), _all(updates, GRADIENT), len(updates)
        averages = [self._of(update, "exp_avg") for update in updates]
        squares = [self._of(update, "exp_avg_sq") for update in updates]
        steps = _all(updates, "step")
        one = self.operator("lift_fresh.default", makes_like=steps[:1])
        self.operator("_foreach_add_.Tensor", steps, one, tensors=count)
        self._free(one)
        decayed: list[int] = []
        if "decoupled" in updates[0].traits:
            self.operator("_foreach_mul_.Scalar", parameters, number=True, tensors=count)
        if "coupled" in updates[0].traits:
            reads = [*gradients, *parameters]
            gradients = decayed = self.operator("_foreach_add.List", reads=reads, makes_like=parameters, tensors=count)
        self.operator("_foreach_lerp_.Scalar", averages, gradients, tensors=count)
        self.operator("_foreach_mul_.Scalar", squares, number=True, tensors=count)
        self.operator("_foreach_addcmul_.Scalar", squares, gradients, tensors=count)
        self._free(decayed)
        for step in (*steps, *steps):
            self.operator("_local_scalar_dense.default", reads=[step])
        if "max_exp_avg_sq" in updates[0].storages:
            highest = [self._of(update, "max_exp_avg_sq") for update in updates]
            self.operator("_foreach_maximum_.List", highest, squares, tensors=count)
            squares = highest
        roots = self.operator("_foreach_sqrt.default", reads=squares, makes_like=parameters, tensors=count)
        self.operator("_foreach_div_.ScalarList", roots, number=True, tensors=count)
        self.operator("_foreach_add_.Scalar", roots, number=True, tensors=count)
        self.operator("_foreach_addcdiv_.ScalarList", parameters, [*averages, *roots], tensors=count)
        self._free(roots)

    def _sgd_foreach(self, updates: Sequence[Update]) -> None:
        parameters, gradients, count = _all(updates, PARAMETER), _all(updates, GRADIENT), len(updates)
        made: list[int] = []
        if "coupled" in updates[0].traits:
            reads = [*gradients, *parameters]
            gradients = made = self.operator("_foreach_add.List", reads=reads, makes_like=parameters, tensors=count)
        if "momentum_buffer" in updates[0].storages:
            momenta = [self._of(update, "momentum_buffer") for update in updates]
            self.operator("_foreach_mul_.Scalar", momenta, number=True, tensors=count)
            self.operator("_foreach_add_.List", momenta, gradients, tensors=count)
            if "nesterov" not in updates[0].traits:
                # Python rebinds the decayed gradients' name to the momenta, which frees the former.
                self._free(made)
                made, gradients = [], momenta
            else:  # Nesterov, in place, on the gradients themselves if nothing was added to them
                self.operator("_foreach_add_.List", gradients, momenta, tensors=count)
        self.operator("_foreach_add_.List", parameters, gradients, tensors=count)
        self._free(made)

    def _fused(self, updates: Sequence[Update]) -> None:
        steps = [update.storages["step"] for update in updates if "step" in update.storages]
        if steps:
            self.operator("_foreach_add_.Scalar", steps, number=True, tensors=len(updates))
        kind = self._algorithm
        if kind == "adam" and "decoupled" in updates[0].traits:
            kind = "adamw"
        changed = [self._of(update, key) for update in updates for key in update.storages if key != "step"]
        self.operator(f"_fused_{kind}_.default", changed, steps)


def _all(updates: Sequence[Update], key: str) -> list[int]:
    return [update.storages[key] for update in updates]


def _alike(updates: Sequence[Update], dtypes: object) -> list[list[Update]]:
    """Groups the updates that one foreach call takes: tensors of one dtype in one parameter group.

    Traces do not record parameter groups; groups with different settings differ in the operators that run.
    """
    together: dict[tuple[frozenset[str], str], list[Update]] = {}
    for update in updates:
        key = (update.traits, str(dtypes[update.storages[PARAMETER]]))  # type: ignore[index]
        together.setdefault(key, []).append(update)
    return list(together.values())
