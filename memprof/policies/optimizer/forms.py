"""Emits the operators with which torch's optimizers update parameters: loop, foreach or fused.

Each form matches torch/optim/adam.py, sgd.py, rmsprop.py and adagrad.py (torch 2.13), operator by operator. The loop
needs one to three temporaries the size of the largest parameter; foreach the same number the size of all parameters;
fused none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from memprof.policies.optimizer import squares
from memprof.policies.optimizer.recognise import GRADIENT, PARAMETER, Update
from memprof.policies.optimizer.update_operators import UpdateOperators
from memprof.policies.rewrite.insertion import Insertion
from memprof.trace.schema import NONE
from memprof.trace.step import Step


class FormWriter(UpdateOperators):
    """Emits the updates of several parameters as one optimizer call would run them."""

    def __init__(self, insertion: Insertion, step: Step, algorithm: str, launch_us: float, us_per_byte: float) -> None:
        """Stores the insertion point and the cost of an operator: its launch and its bytes."""
        super().__init__(insertion, step, launch_us, us_per_byte)
        self._algorithm = algorithm

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
        self.begin(like=like, before=before, module_id=module_id, replaced=replaced or {})
        forms: dict[str, tuple[Callable[[Update], None], Callable[[Sequence[Update]], None]]] = {
            "adam": (self._adam_loop, self._adam_foreach),
            "sgd": (self._sgd_loop, self._sgd_foreach),
            "rmsprop": (partial(squares.rmsprop_loop, self), partial(squares.rmsprop_foreach, self)),
            "adagrad": (partial(squares.adagrad_loop, self), partial(squares.adagrad_foreach, self)),
        }
        loop, foreach = forms[self._algorithm]
        if form == "loop":
            for update in updates:
                loop(update)
        else:
            for together in _alike(updates, self.dtypes):
                (self._fused if form == "fused" else foreach)(together)
        return self.end()

    def _adam_loop(self, update: Update) -> None:
        parameter, gradient = update.storages[PARAMETER], update.storages[GRADIENT]
        average, square = self.state(update, "exp_avg"), self.state(update, "exp_avg_sq")
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
            highest = self.state(update, "max_exp_avg_sq")
            self.operator("maximum.out", [highest], [square])
            square = highest
        root = self.operator("sqrt.default", reads=[square], makes_like=[parameter])
        denominator = self.operator("div.Tensor", reads=root, makes_like=[parameter], number=True)
        self.free(root)
        self.operator("add_.Tensor", denominator, number=True)
        self.hold(denominator[0])
        self.operator("addcdiv_.default", [parameter], [average, *denominator])
        self.free(decayed)

    def _sgd_loop(self, update: Update) -> None:
        parameter, gradient = update.storages[PARAMETER], update.storages[GRADIENT]
        made: list[int] = []
        if "coupled" in update.traits:
            made = self.operator("add.Tensor", reads=[gradient, parameter], makes_like=[parameter])
            gradient = made[0]
        if "momentum_buffer" in update.storages:
            momentum = self.state(update, "momentum_buffer")
            self.operator("mul_.Tensor", [momentum], number=True)
            self.operator("add_.Tensor", [momentum], [gradient])
            if "nesterov" in update.traits:
                ahead = self.operator("add.Tensor", reads=[gradient, momentum], makes_like=[parameter])
                self.free(made)
                made, gradient = ahead, ahead[0]
            else:
                # Python rebinds the decayed gradient's name to the momentum, which frees the former.
                self.free(made)
                made, gradient = [], momentum
        self.operator("add_.Tensor", [parameter], [gradient])
        self.free(made)

    def _adam_foreach(self, updates: Sequence[Update]) -> None:
        parameters, gradients, count = _all(updates, PARAMETER), _all(updates, GRADIENT), len(updates)
        averages = [self.state(update, "exp_avg") for update in updates]
        squares = [self.state(update, "exp_avg_sq") for update in updates]
        steps = _all(updates, "step")
        one = self.operator("lift_fresh.default", makes_like=steps[:1])
        self.operator("_foreach_add_.Tensor", steps, one, tensors=count)
        self.free(one)
        decayed: list[int] = []
        if "decoupled" in updates[0].traits:
            self.operator("_foreach_mul_.Scalar", parameters, number=True, tensors=count)
        if "coupled" in updates[0].traits:
            reads = [*gradients, *parameters]
            gradients = decayed = self.operator("_foreach_add.List", reads=reads, makes_like=parameters, tensors=count)
        self.operator("_foreach_lerp_.Scalar", averages, gradients, tensors=count)
        self.operator("_foreach_mul_.Scalar", squares, number=True, tensors=count)
        self.operator("_foreach_addcmul_.Scalar", squares, gradients, tensors=count)
        self.free(decayed)
        for step in (*steps, *steps):
            self.operator("_local_scalar_dense.default", reads=[step])
        if "max_exp_avg_sq" in updates[0].storages:
            highest = [self.state(update, "max_exp_avg_sq") for update in updates]
            self.operator("_foreach_maximum_.List", highest, squares, tensors=count)
            squares = highest
        roots = self.operator("_foreach_sqrt.default", reads=squares, makes_like=parameters, tensors=count)
        self.operator("_foreach_div_.ScalarList", roots, number=True, tensors=count)
        self.operator("_foreach_add_.Scalar", roots, number=True, tensors=count)
        self.operator("_foreach_addcdiv_.ScalarList", parameters, [*averages, *roots], tensors=count)
        self.free(roots)

    def _sgd_foreach(self, updates: Sequence[Update]) -> None:
        parameters, gradients, count = _all(updates, PARAMETER), _all(updates, GRADIENT), len(updates)
        made: list[int] = []
        if "coupled" in updates[0].traits:
            reads = [*gradients, *parameters]
            gradients = made = self.operator("_foreach_add.List", reads=reads, makes_like=parameters, tensors=count)
        if "momentum_buffer" in updates[0].storages:
            momenta = [self.state(update, "momentum_buffer") for update in updates]
            self.operator("_foreach_mul_.Scalar", momenta, number=True, tensors=count)
            self.operator("_foreach_add_.List", momenta, gradients, tensors=count)
            if "nesterov" not in updates[0].traits:
                # Python rebinds the decayed gradients' name to the momenta, which frees the former.
                self.free(made)
                made, gradients = [], momenta
            else:  # Nesterov, in place, on the gradients themselves if nothing was added to them
                self.operator("_foreach_add_.List", gradients, momenta, tensors=count)
        self.operator("_foreach_add_.List", parameters, gradients, tensors=count)
        self.free(made)

    def _fused(self, updates: Sequence[Update]) -> None:
        steps = [update.storages["step"] for update in updates if "step" in update.storages]
        if steps:
            self.operator("_foreach_add_.Scalar", steps, number=True, tensors=len(updates))
        kind = self._algorithm
        if kind == "adam" and "decoupled" in updates[0].traits:
            kind = "adamw"
        changed = [self.state(update, key) for update in updates for key in update.storages if key != "step"]
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
