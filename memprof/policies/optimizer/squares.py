"""Emits the operators of torch's RMSprop and Adagrad, which divide gradients by the root of their averaged squares."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.policies.optimizer.recognise import GRADIENT, PARAMETER, Update
from memprof.policies.optimizer.update_operators import UpdateOperators


def rmsprop_loop(write: UpdateOperators, update: Update) -> None:
    """Emits the update of one parameter by RMSprop's loop."""
    parameter, square = update.storages[PARAMETER], write.state(update, "square_avg")
    write.operator("add_.Tensor", [update.storages["step"]], number=True)
    gradient, decayed = _decayed(write, update)
    write.operator("mul_.Tensor", [square], number=True)
    write.operator("addcmul_.default", [square], [gradient])
    if "grad_avg" in update.storages:
        average = write.state(update, "grad_avg")
        write.operator("lerp_.Scalar", [average], [gradient])
        root = write.operator("addcmul.default", reads=[square, average], makes_like=[parameter])
        write.operator("sqrt_.default", root)
    else:
        root = write.operator("sqrt.default", reads=[square], makes_like=[parameter])
    write.hold(root[0])
    write.operator("add_.Tensor", root, number=True)
    if "momentum_buffer" in update.storages:
        momentum = write.state(update, "momentum_buffer")
        write.operator("mul_.Tensor", [momentum], number=True)
        write.operator("addcdiv_.default", [momentum], [gradient, *root])
        write.operator("add_.Tensor", [parameter], [momentum])
    else:
        write.operator("addcdiv_.default", [parameter], [gradient, *root])
    write.free(decayed)


def rmsprop_foreach(write: UpdateOperators, updates: Sequence[Update]) -> None:
    """Emits the updates of several parameters at once by RMSprop."""
    parameters, count = [update.storages[PARAMETER] for update in updates], len(updates)
    squares = [write.state(update, "square_avg") for update in updates]
    _count_steps(write, updates)
    gradients, decayed = _all_decayed(write, updates)
    write.operator("_foreach_mul_.Scalar", squares, number=True, tensors=count)
    write.operator("_foreach_addcmul_.Scalar", squares, gradients, tensors=count)
    if "grad_avg" in updates[0].storages:
        averages = [write.state(update, "grad_avg") for update in updates]
        write.operator("_foreach_lerp_.Scalar", averages, gradients, tensors=count)
        reads = [*squares, *averages]
        roots = write.operator("_foreach_addcmul.Scalar", reads=reads, makes_like=parameters, tensors=count)
        write.operator("_foreach_sqrt_.default", roots, tensors=count)
    else:
        roots = write.operator("_foreach_sqrt.default", reads=squares, makes_like=parameters, tensors=count)
    write.operator("_foreach_add_.Scalar", roots, number=True, tensors=count)
    if "momentum_buffer" in updates[0].storages:
        momenta = [write.state(update, "momentum_buffer") for update in updates]
        write.operator("_foreach_mul_.Scalar", momenta, number=True, tensors=count)
        write.operator("_foreach_addcdiv_.Scalar", momenta, [*gradients, *roots], tensors=count)
        write.operator("_foreach_add_.List", parameters, momenta, tensors=count)
    else:
        write.operator("_foreach_addcdiv_.Scalar", parameters, [*gradients, *roots], tensors=count)
    write.free([*roots, *decayed])


def adagrad_loop(write: UpdateOperators, update: Update) -> None:
    """Emits the update of one parameter by Adagrad's loop."""
    parameter, total = update.storages[PARAMETER], write.state(update, "sum")
    write.operator("add_.Tensor", [update.storages["step"]], number=True)
    write.operator("_local_scalar_dense.default", reads=[update.storages["step"]])
    gradient, decayed = _decayed(write, update)
    write.operator("addcmul_.default", [total], [gradient])
    root = write.operator("sqrt.default", reads=[total], makes_like=[parameter])
    write.operator("add_.Tensor", root, number=True)
    write.hold(root[0])
    write.operator("addcdiv_.default", [parameter], [gradient, *root])
    write.free(decayed)


def adagrad_foreach(write: UpdateOperators, updates: Sequence[Update]) -> None:
    """Emits the updates of several parameters at once by Adagrad."""
    parameters, count = [update.storages[PARAMETER] for update in updates], len(updates)
    totals = [write.state(update, "sum") for update in updates]
    _count_steps(write, updates)
    gradients, decayed = _all_decayed(write, updates)
    for update in updates:
        write.operator("_local_scalar_dense.default", reads=[update.storages["step"]])
    write.operator("_foreach_addcmul_.Scalar", totals, gradients, tensors=count)
    roots = write.operator("_foreach_sqrt.default", reads=totals, makes_like=parameters, tensors=count)
    write.operator("_foreach_add_.Scalar", roots, number=True, tensors=count)
    if decayed:
        scaled = decayed
        write.operator("_foreach_mul_.ScalarList", scaled, number=True, tensors=count)
    else:
        name = "_foreach_mul.ScalarList"
        scaled = write.operator(name, reads=gradients, makes_like=parameters, number=True, tensors=count)
    write.operator("_foreach_addcdiv_.Scalar", parameters, [*scaled, *roots], tensors=count)
    write.free([*roots, *scaled])


def _decayed(write: UpdateOperators, update: Update) -> tuple[int, list[int]]:
    """Emits weight decay; returns the gradient to use, and the storages made for it."""
    parameter, gradient = update.storages[PARAMETER], update.storages[GRADIENT]
    if "coupled" not in update.traits:
        return gradient, []
    made = write.operator("add.Tensor", reads=[gradient, parameter], makes_like=[parameter])
    return made[0], made


def _all_decayed(write: UpdateOperators, updates: Sequence[Update]) -> tuple[list[int], list[int]]:
    parameters, gradients = ([update.storages[key] for update in updates] for key in (PARAMETER, GRADIENT))
    if "coupled" not in updates[0].traits:
        return gradients, []
    reads = [*gradients, *parameters]
    made = write.operator("_foreach_add.List", reads=reads, makes_like=parameters, tensors=len(updates))
    return made, made


def _count_steps(write: UpdateOperators, updates: Sequence[Update]) -> None:
    steps = [update.storages["step"] for update in updates]
    one = write.operator("lift_fresh.default", makes_like=steps[:1])
    write.operator("_foreach_add_.Tensor", steps, one, tensors=len(updates))
    write.free(one)
