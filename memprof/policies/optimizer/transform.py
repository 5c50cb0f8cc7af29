"""Estimates when an update's state, gradients and temporaries are in memory; a dry run says what a step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.eight_bit import eight_bit_bytes
from memprof.policies.optimizer.freed_gradients import free_gradients
from memprof.policies.optimizer.host_bytes import moved_state
from memprof.policies.optimizer.refusals import IN_HOST_MEMORY, refuse_optimizers
from memprof.policies.optimizer.single_updates import CALL_US, is_updating, single_updates, update_form
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import sum_during
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy


def transform(step: Step, policy: OptimizerPolicy) -> Step:
    """Estimates a step: fused updates make nothing, others up to two numbers for each parameter updated at once.

    Raises:
        PolicyError: The step has no update, or none that the policy can change.
    """
    refuse_optimizers(step, policy)
    draft, storages, is_update, recorded = Draft(step), step.storages, is_updating(step), update_form(step)
    used = np.unique(step.uses.storage_id[is_update[step.uses.op_id]])
    sizes = storages.allocated_bytes[used[storages.category[used] == "parameter"]]
    if not sizes.any():
        raise PolicyError("The step has no optimizer update of a known parameter; the optimizer policy needs one.")
    if policy.state == "host" and not step.targets_device():
        raise PolicyError(IN_HOST_MEMORY)
    singly, form = policy.in_backward or policy.state == "host", policy.loop or recorded
    if singly and not (step.optimizers and all(each.has_form("loop") for each in step.optimizers)):
        single_updates(step)  # raises where updates depend on each other, as torch's own do not
    allocated, workspace, state = storages.allocated_bytes.copy(), step.ops.workspace_bytes.copy(), moved_state(step)
    made = (storages.category == "temporary") & np.append(is_update, False)[storages.created_op_id]
    spent = sum_during(storages.take(made), len(is_update)).max()
    numbers = 1.0 if recorded == "fused" else min(2.0, spent / (sizes.sum() if recorded == "foreach" else sizes.max()))
    numbers = 0.0 if "fused" in form or policy.state == "8bit" else numbers
    if policy.state == "8bit":
        allocated[state] = eight_bit_bytes(allocated[state])
    elif policy.state == "host":  # that of one parameter at a time is copied from there and back
        numbers += allocated[state].sum() / sizes.sum()
        rates = (step.to_host_bytes_per_us or 24e3, step.from_host_bytes_per_us or 24e3)  # or PCIe 4.0 x16
        draft.duration_us += sum(float(allocated[state].sum()) / rate for rate in rates)
        allocated[state] = 0
    if singly or policy.state or form != recorded:
        allocated[made] = 0
        workspace[is_update] += int(numbers * (sizes.sum() if form == "foreach" and not singly else sizes.max()))
    draft.duration_us += CALL_US * (len(sizes) - 1) * singly
    if policy.in_backward:
        workspace[is_update] = step.ops.workspace_bytes[is_update]
        free_gradients(draft, step, workspace, numbers)
    draft.storages = draft.storages.replace(allocated_bytes=allocated)
    draft.ops = draft.ops.replace(workspace_bytes=workspace)
    return draft.build()
