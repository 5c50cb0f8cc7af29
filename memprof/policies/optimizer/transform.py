"""Estimates when an update's state, gradients and temporaries are in memory; a dry run says what a step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import IN_HOST_MEMORY, refuse_optimizers
from memprof.policies.optimizer.single_updates import (
    CALL_US,
    eight_bit_bytes,
    free_gradients,
    is_updating,
    single_updates,
    update_form,
)
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import sum_during
from memprof.replay.rounding import rounded_when_pinned
from memprof.trace.schema import Bools
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy


def transform(step: Step, policy: OptimizerPolicy) -> Step:
    """Estimates a step: fused updates make nothing, others one or two numbers for each parameter of a call.

    Raises:
        PolicyError: The step has no update, or none that the policy can change.
    """
    refuse_optimizers(step, policy)
    draft, storages, is_update, recorded = Draft(step), step.storages, is_updating(step), update_form(step)
    used = np.unique(step.uses.storage_id[is_update[step.uses.op_id]])
    sizes = storages.allocated_bytes[used[storages.category[used] == "parameter"]]
    if not sizes.any():
        raise PolicyError("the step has no optimizer update of a known parameter; the optimizer policy needs one.")
    if policy.state == "host" and not step.targets_device():
        raise PolicyError(IN_HOST_MEMORY)
    singly, whole, largest = policy.in_backward or policy.state == "host", int(sizes.sum()), int(sizes.max())
    if singly and not (step.optimizers and all(each.has_form("loop") for each in step.optimizers)):
        single_updates(step)  # raises where updates depend on each other, as torch's own do not
    form = "fused" if policy.state == "8bit" else policy.loop or recorded
    allocated, workspace, state = storages.allocated_bytes.copy(), step.ops.workspace_bytes.copy(), _moved_state(step)
    made = (storages.category == "temporary") & np.append(is_update, False)[storages.created_op_id]
    spent = sum_during(storages.take(made), len(is_update)).max()
    numbers = {"fused": 0.0, "foreach": 1.0, "loop": 2.0}[form]
    if recorded != "fused" and spent < (whole if recorded == "foreach" else largest):
        numbers = 0.0  # as of SGD
    if policy.state == "8bit":
        allocated[state] = eight_bit_bytes(allocated[state])
    if policy.state == "host":  # that of one parameter at a time is copied from there and back
        numbers += allocated[state].sum() / whole
        rates = (step.to_host_bytes_per_us or 24e3, step.from_host_bytes_per_us or 24e3)  # or PCIe 4.0 x16
        draft.duration_us += sum(float(allocated[state].sum()) / rate for rate in rates)
        allocated[state] = 0
    if singly or form != recorded:
        allocated[made] = 0
        at_once = 0 if policy.in_backward else whole if form == "foreach" and not singly else largest
        workspace[is_update] += int(numbers * at_once)
        draft.duration_us += CALL_US * (len(sizes) - 1) * singly
    if policy.in_backward:
        free_gradients(draft, step, workspace, numbers)
    draft.storages = draft.storages.replace(allocated_bytes=allocated)
    draft.ops = draft.ops.replace(workspace_bytes=workspace)
    return draft.build()


def host_bytes(step: Step, policy: OptimizerPolicy) -> int:
    """Returns the pinned bytes of the state that a policy keeps in host memory; nothing else of it matters."""
    sizes = step.storages.requested_bytes[_moved_state(step)]
    return int(rounded_when_pinned(sizes, step.allocator_settings).sum())


def _moved_state(step: Step) -> Bools:
    found: Bools = (step.storages.category == "optimizer_state") & (step.storages.shape != "")
    return found
