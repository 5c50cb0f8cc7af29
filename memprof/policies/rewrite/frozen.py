"""Parameters that a job does not train: autocast caches no copy of them."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Bools
from memprof.trace.step import Step
from memprof.trace.usages import modules_without_gradient


def frozen_parameters(step: Step) -> Bools:
    """Marks the parameters of modules that have no gradient in any recorded step, shape ``(storages,)``.

    Parameters of an optimizer that require gradients and have none are not among them: autocast caches their copies.
    None where gradients cannot be assigned to modules: where several share a storage, as DistributedDataParallel's
    buckets do, or nothing is trained, or where no model contains a parameter without a gradient.
    """
    storages = step.storages
    without = modules_without_gradient(step.usages)
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
