"""Autocast's cache of low-precision weights, and views through which operators read storages."""

from __future__ import annotations

import numpy as np

from memprof.trace.kept import kept
from memprof.trace.operator_facts import CAST, INNER_VIEWS, OUTER_VIEWS, are_among
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step
from memprof.trace.usages import WITHOUT_GRADIENT, modules_in


def cached_until(step: Step, is_hidden: Bools) -> Ints:
    """Returns the operator up to which autocast's cache holds each storage, NONE where it does not hold it.

    It holds no copies of frozen parameters, and none of views: each operator that reads one casts it anew.

    Args:
        step: The step.
        is_hidden: Storages with a longer-lived reference elsewhere, so that their end does not show the cache's.
    """
    casts = _casts_of(step, (step.storages.category == "parameter") & ~frozen_parameters(step))
    casts[casts] = ~_is_of_view(step)[step.storages.created_op_id[casts]]
    return np.where(casts, _cache_end(step, casts & ~is_hidden), NONE)


@kept
def parameter_casts(step: Step) -> Bools:
    """Marks the storages that hold a parameter in another type, made in forward, shape ``(storages,)``.

    Under autocast those of trained parameters are in its cache, which lives as long as the outermost autocast context.
    """
    return _casts_of(step, step.storages.category == "parameter")


@kept
def _is_of_view(step: Step) -> Bools:
    """Returns which operators read a parameter through a view that the job's code made, ``(ops,)``."""
    uses = step.uses
    rows = np.flatnonzero((uses.role == "read") & (step.storages.category == "parameter")[uses.storage_id])
    found = np.zeros(len(step.ops), dtype=np.bool_)
    found[uses.op_id[rows]] = reads_callers_view(step, uses.storage_id[rows], uses.op_id[rows])
    return found


def _casts_of(step: Step, is_parameter: Bools) -> Bools:
    uses = step.uses
    reads_parameter = np.zeros(len(step.ops), dtype=np.bool_)
    is_read = (uses.role == "read") & is_parameter[uses.storage_id]
    reads_parameter[uses.op_id[is_read]] = True
    is_cast = (step.ops.name == CAST) & (step.ops.phase == "forward") & reads_parameter
    created = step.storages.created_op_id
    casts: Bools = (created != NONE) & is_cast[created]
    return casts


def _cache_end(step: Step, seen: Bools) -> Ints:
    """Returns when autocast's cache is cleared that a storage made by an operator is in, shape ``(storages,)``.

    Casts that nobody saves, such as those of biases, show it; else it is the end of the outermost module's call.
    """
    calls = step.module_calls
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    end = np.full(len(created), NONE, dtype=np.int64)
    for call in np.flatnonzero((calls.parent_call_id == NONE) & ~calls.is_recompute & (calls.first_op_id != NONE)):
        is_inside = (created >= calls.first_op_id[call]) & (created <= calls.last_op_id[call])
        shown = freed[is_inside & seen & (freed != NONE)]
        end[is_inside] = shown.max() if len(shown) else calls.last_op_id[call]
    return end


def frozen_parameters(step: Step) -> Bools:
    """Marks the parameters of modules that have no gradient in any recorded step, shape ``(storages,)``.

    Parameters of an optimizer that require gradients and have none are not among them: autocast caches their copies.
    None where gradients cannot be assigned to modules: where several share a storage, as DistributedDataParallel's
    buckets do, or nothing is trained, or where no model contains a parameter without a gradient.
    """
    storages = step.storages
    without = modules_in(step.usages, WITHOUT_GRADIENT)
    is_parameter, is_gradient = storages.category == "parameter", storages.category == "gradient"
    owners = storages.module_id[is_gradient]
    largest = np.zeros(len(step.modules) + 1, dtype=np.int64)  # the last stands for no module
    np.maximum.at(largest, storages.module_id[is_parameter], storages.requested_bytes[is_parameter])
    is_shared = storages.requested_bytes[is_gradient] > largest[owners]
    trained = np.union1d(owners, np.asarray(step.trained_modules, dtype=np.int64))
    if not len(trained) or NONE in without or np.any(is_shared | (owners == NONE)):
        return np.zeros(len(storages), dtype=np.bool_)
    frozen: Bools = is_parameter & ~np.isin(storages.module_id, [*trained, *without])
    return frozen


def reads_callers_view(step: Step, sources: Ints, readers: Ints) -> Bools:
    """Returns which readers are given a view that their caller made of the source: ``x @ weight.T``, not ``linear``.

    Args:
        step: The step.
        sources: Storages.
        readers: An operator that reads each.
    """
    keys, bound = _views_until(step, INNER_VIEWS | OUTER_VIEWS)
    count, place = len(step.ops) + 1, np.arange(len(keys))
    made = np.maximum.accumulate(np.where(_named(step, OUTER_VIEWS)[keys % count], place, -1))
    found: Bools = (made > bound)[np.searchsorted(keys, sources * count + readers)]
    return found


@kept
def _views_until(step: Step, names: frozenset[str]) -> tuple[Ints, Ints]:
    """Walks back from each use of a storage through its uses before, to the first that is not a view.

    Returns:
        Uses, one a storage and operator, as ``storage * (ops + 1) + operator``, in order; and the place of that first
        one, or the place before the storage's first.
    """
    uses, count = step.uses, len(step.ops) + 1
    keys: Ints = np.unique(uses.storage_id * count + uses.op_id)
    place = np.arange(len(keys))
    is_bound = np.append(True, np.diff(keys // count) != 0)[: len(keys)]
    is_view = _named(step, names)[keys % count]
    bound = np.maximum.accumulate(np.where(is_bound, place - 1, np.append(-1, np.where(is_view, -1, place)[:-1])))
    return keys, bound


@kept
def _named(step: Step, names: frozenset[str]) -> Bools:
    """Returns which operators are among some, ``(ops,)``."""
    return are_among(step.ops.name, names)
