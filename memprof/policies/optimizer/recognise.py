"""Reads the optimizer updates of a recorded step: their parameters, order, storages and form."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.errors import PolicyError
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Keys of an update's parameter and gradient, next to those of its state.
PARAMETER, GRADIENT = "", "gradient"

ZEROING = ("aten.zero_.default", "aten._foreach_zero_.default")
#: Run where updates maximize or the learning rate is a tensor, which a fused kernel hides, and no other form here has.
NEGATIONS = ("aten.neg.default", "aten._foreach_neg.default")
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_AMSGRAD = {"max_exp_avg_sq"}
_SGD = {"momentum_buffer"}
_RMSPROP, _MOMENTUM = {"step", "square_avg"}, {"momentum_buffer", "grad_avg"}
_ADAGRAD = {"step", "sum"}
_NAMES = (
    {f"add_.{kind}" for kind in ("Tensor", "Scalar")}
    | {"mul_.Tensor", "add.Tensor", "lerp_.Scalar", "addcmul_.default", "addcdiv_.default", "sqrt.default"}
    | {"div.Tensor", "maximum.out", "_local_scalar_dense.default", "lift_fresh.default"}
    | {f"_foreach_{name}" for name in ("add_.Tensor", "add_.Scalar", "add_.List", "add.List", "mul_.Scalar")}
    | {f"_foreach_{name}" for name in ("lerp_.Scalar", "addcmul_.Scalar", "sqrt.default", "div_.ScalarList")}
    | {"_foreach_addcdiv_.ScalarList", "_foreach_maximum_.List", "neg.default", "_foreach_neg.default"}
    | {f"_fused_{name}_.{kind}" for name in ("adam", "adamw", "sgd") for kind in ("default", "tensor_lr")}
)
#: The same, with those that only RMSprop and Adagrad run.
_SQUARES_NAMES = _NAMES | {
    *("addcmul.default", "sqrt_.default", "_foreach_addcmul.Scalar", "_foreach_sqrt_.default"),
    *("_foreach_addcdiv_.Scalar", "_foreach_mul.ScalarList", "_foreach_mul_.ScalarList"),
    *("_fused_adagrad_.default", "_fused_adagrad_.tensor_lr"),
}


@dataclass(frozen=True)
class Update:
    """The update of one parameter.

    Attributes:
        name: Qualified name of the parameter.
        storages: Storages by key: PARAMETER, GRADIENT, and the state's keys.
        completed_by: Backward operator that completes the gradient, NONE where it is not computed in the step.
        traits: Options of the update: "decoupled" or "coupled" weight decay, "nesterov".
    """

    name: str
    storages: dict[str, int]
    completed_by: int
    traits: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True)
class Updates:
    """All updates of a step.

    Attributes:
        ops: Operators of the optimizers, in order.
        owner: Row of ``updates`` each of ``ops`` belongs to; NONE for those shared by several. Shape ``(ops,)``.
        updates: The updates, in the optimizer's order.
        form: loop, foreach or fused.
        algorithm: adam, sgd, rmsprop, adagrad, or "" for any other.
    """

    ops: Ints
    owner: Ints
    updates: tuple[Update, ...]
    form: str
    algorithm: str


def recognise_updates(step: Step) -> Updates:
    """Reads the updates of a step.

    Raises:
        PolicyError: The step has none.
    """
    ops, storages, uses = step.ops, step.storages, step.uses
    own = np.flatnonzero((ops.phase == "optimizer") & ~np.isin(ops.name, ZEROING))
    is_own: Bools = np.zeros(len(ops), dtype=np.bool_)
    is_own[own] = True
    inside = np.flatnonzero(is_own[uses.op_id])
    use_op, use_storage = uses.op_id[inside], uses.storage_id[inside]
    parameter_of = _parameters(step)
    use_parameter = parameter_of[use_storage]
    known = use_parameter != NONE
    if not known.any():
        raise PolicyError("The step has no optimizer update of a known parameter; the optimizer policy needs one.")

    # An operator that names one parameter belongs to it, as do the following ones that name none.
    lowest, highest = np.full(len(ops), len(storages)), np.full(len(ops), NONE)
    np.minimum.at(lowest, use_op[known], use_parameter[known])
    np.maximum.at(highest, use_op[known], use_parameter[known])
    alone = np.flatnonzero(lowest == highest)
    named_alone = np.full(len(storages), len(ops), dtype=np.int64)
    np.minimum.at(named_alone, lowest[alone], alone)

    # A loop visits the parameters in the order in which its operators name them; foreach in the order in which it reads
    # their counts of steps, or else in that in which their state was recorded. Within one operator the order of
    # accesses carries no information.
    parameters, first = np.unique(use_parameter[known], return_index=True)
    is_state = known & (storages.category[use_storage] == "optimizer_state")
    state = np.full(len(storages), len(storages), dtype=np.int64)
    np.minimum.at(state, use_parameter[is_state], use_storage[is_state])
    parameters = parameters[np.lexsort((state[parameters], named_alone[parameters], use_op[known][first]))]
    row_of = np.full(len(storages) + 1, NONE, dtype=np.int64)
    row_of[parameters] = np.arange(len(parameters))

    place = np.where(highest[own] != NONE, np.arange(len(own)), -1)
    carried = np.maximum.accumulate(place)
    carried = np.where(carried < 0, place[place >= 0][0] if (place >= 0).any() else 0, carried)
    owner = np.where(lowest[own] == highest[own], row_of[np.minimum(highest[own], len(storages))], NONE)[carried]

    names = ops.name[own]
    form = "loop"
    for prefix, kind in (("aten._foreach_", "foreach"), ("aten._fused_", "fused")):
        if any(str(name).startswith(prefix) for name in names):
            form = kind
    updates = _updates(step, own, parameters, parameter_of, use_op, use_storage, uses.role[inside], form)
    used = {str(name).removeprefix("aten.") for name in names}
    return Updates(own, owner, updates, form, _algorithm(used, updates))


def _algorithm(names: set[str], updates: tuple[Update, ...]) -> str:
    """Returns the algorithm that runs these operators on the updates' state; "" for any other."""
    keys = {key for update in updates for key in update.storages} - {PARAMETER, GRADIENT}
    found = ""
    if names <= _NAMES and keys <= _SGD:
        found = "sgd"
    for kind, known, always, more in (
        ("adam", _NAMES, _ADAM, _AMSGRAD),
        ("rmsprop", _SQUARES_NAMES, _RMSPROP, _MOMENTUM),
        ("adagrad", _SQUARES_NAMES, _ADAGRAD, set[str]()),
    ):
        is_like = names <= known and keys <= always | more
        if is_like and all(update.storages.keys() >= always for update in updates):
            found = kind
    return found


def gradients_of_earlier_steps(step: Step, updates: Updates) -> Ints:
    """Returns gradients that are live at the start of the step and not used by its updates."""
    storages = step.storages
    used = [update.storages[GRADIENT] for update in updates.updates if GRADIENT in update.storages]
    is_old = (storages.category == "gradient") & (storages.created_op_id == NONE)
    return np.setdiff1d(np.flatnonzero(is_old), np.asarray(used, dtype=np.int64))


def _parameters(step: Step) -> Ints:
    """Returns the parameter storage each storage belongs to, NONE for storages of no parameter."""
    storages = step.storages
    by_name = {str(storages.name[i]): int(i) for i in np.flatnonzero(storages.category == "parameter")}
    owner = np.full(len(storages), NONE, dtype=np.int64)
    for row in np.flatnonzero(np.isin(storages.category, ("parameter", "gradient", "optimizer_state"))):
        name = str(storages.name[row])
        if storages.category[row] == "optimizer_state":
            name = name.rpartition(".")[0]
        owner[row] = by_name.get(name, NONE)
    return owner


def _updates(
    step: Step,
    own: Ints,
    parameters: Ints,
    parameter_of: Ints,
    use_op: Ints,
    use_storage: Ints,
    role: np.ndarray[tuple[int, ...], np.dtype[np.object_]],
    form: str,
) -> tuple[Update, ...]:
    storages, ops = step.storages, step.ops
    used = np.unique(use_storage)
    completed = _completed_by(step)
    keys: dict[int, dict[str, int]] = {int(parameter): {PARAMETER: int(parameter)} for parameter in parameters}
    for storage in used[parameter_of[used] != NONE]:
        category = storages.category[storage]
        if category != "parameter":
            key = GRADIENT if category == "gradient" else str(storages.name[storage]).rpartition(".")[2]
            keys[int(parameter_of[storage])][key] = int(storage)
    name = ops.name[use_op]
    is_parameter = storages.category[use_storage] == "parameter"
    traits: dict[str, set[int]] = {"decoupled": set(), "coupled": set(), "nesterov": set()}
    scaled = is_parameter & (role == "mutate") & np.isin(name, ("aten.mul_.Tensor", "aten._foreach_mul_.Scalar"))
    # A fused kernel hides weight decay, which needs no memory there; AdamW's is decoupled.
    scaled |= is_parameter & np.isin(name, ("aten._fused_adamw_.default", "aten._fused_adamw_.tensor_lr"))
    traits["decoupled"].update(use_storage[scaled].tolist())
    added = np.isin(name, ("aten.add.Tensor", "aten._foreach_add.List"))
    traits["coupled"].update(use_storage[is_parameter & (role == "read") & added].tolist())
    is_momentum = np.isin(use_storage, [k["momentum_buffer"] for k in keys.values() if "momentum_buffer" in k])
    of_momentum = is_momentum & (role == "read")
    changes_parameter = np.isin(use_op, use_op[is_parameter & (role == "mutate")])
    ahead = of_momentum & ~changes_parameter & (added | (name == "aten._foreach_add_.List"))
    traits["nesterov"].update(parameter_of[use_storage[ahead]].tolist())
    return tuple(
        Update(
            name=str(storages.name[parameter]),
            storages=keys[int(parameter)],
            completed_by=int(completed[keys[int(parameter)].get(GRADIENT, 0)])
            if GRADIENT in keys[int(parameter)]
            else NONE,
            traits=frozenset(trait for trait, those in traits.items() if int(parameter) in those),
        )
        for parameter in parameters
    )


def _completed_by(step: Step) -> Ints:
    """Returns the last backward operator that completes each storage as a gradient, NONE for others.

    Autograd's accumulation belongs to no forward operator; it is the last backward operator to touch a gradient.
    """
    uses, ops = step.uses, step.ops
    accumulates = (ops.phase == "backward") & (ops.forward_op_id == NONE)
    last = np.full(len(step.storages), NONE, dtype=np.int64)
    for is_wanted in (ops.phase == "backward", accumulates):
        rows = is_wanted[uses.op_id]
        found = np.full(len(step.storages), NONE, dtype=np.int64)
        np.maximum.at(found, uses.storage_id[rows], uses.op_id[rows])
        last = np.where(found != NONE, found, last)
    return last
