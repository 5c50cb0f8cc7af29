"""Rewrites a recorded float32 step into one that runs in a short type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.precision.autocast_lists import (
    LASTING,
    OFTEN_FLOAT32_SHORT,
    SHORT_TYPES,
    is_one_of,
    plain_names,
)
from memprof.policies.precision.backward import cast_gradients, made_whole, short_gradients
from memprof.policies.precision.casts import Casts, cast_their_gradients
from memprof.policies.precision.ends import Nodes
from memprof.policies.precision.flow import OwnCasts, Types, follow_types
from memprof.policies.precision.misfits import (
    refuse_compiled,
    refuse_mixed_types,
    refuse_own_autocast,
    refuse_recurrent,
    refuse_rounded_integers,
    refuse_sparse,
    refuse_unscaled,
)
from memprof.policies.precision.policy import LBFGS, NO_BF16
from memprof.policies.precision.region_casts import cast_inputs, cast_outputs, cast_reads
from memprof.policies.precision.roots import of_trained_models
from memprof.policies.precision.times import Rates, retime
from memprof.policies.precision.workspaces import short_workspaces
from memprof.policies.rewrite.carried import carried_over
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import live_bytes
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools
from memprof.trace.usages import IS_LBFGS

if TYPE_CHECKING:
    from memprof.policies.precision.policy import Precision
    from memprof.trace.step import Step


def transform(step: Step, policy: Precision, *, at_most: bool = False) -> Step:
    """Rewrites a recorded float32 step into one that runs in a short type.

    Forward is followed operator by operator along autocast's lists; saved tensors, gradients and temporaries take the
    resulting types; casts become operators with storages of their own.

    Args:
        step: The recorded step.
        policy: The policy.
        at_most: Whether to assume that the job runs in float32 the operators that such jobs often cast to it.

    Raises:
        PolicyError: The step has no model in float32, or one that does not support a short type.
    """
    refuse_own_autocast(step, policy)
    refuse_compiled(step, policy)
    if at_most and policy.is_pure and is_one_of(plain_names(step.ops.name), OFTEN_FLOAT32_SHORT).any():
        # After its own casts to float32 such a job may go on in float32, or cast back before the next product.
        made = [_rewritten(step, policy, casts) for casts in (OwnCasts.STAY, OwnCasts.BACK)]
        return max(made, key=lambda one: int(live_bytes(one).during.max(initial=0)))
    return _rewritten(step, policy, OwnCasts.STAY if at_most else OwnCasts.NONE)


def _rewritten(step: Step, policy: Precision, own_casts: OwnCasts) -> Step:
    if policy.dtype == "fp16" and any(IS_LBFGS in optimizer.words for optimizer in step.optimizers):
        raise PolicyError(LBFGS)
    if policy.dtype == "bf16" and not step.runs_bf16():
        raise PolicyError(NO_BF16)
    types = follow_types(step, is_pure=policy.is_pure, own_casts=own_casts)
    refuse_mixed_types(step, types)
    refuse_recurrent(step, types, policy)
    refuse_sparse(step, types)
    refuse_rounded_integers(step, types, policy)
    if policy.dtype == "fp16":
        refuse_unscaled(step, types)
    nodes = Nodes(step, types)
    draft = Draft(step)
    rates = Rates(step, types)
    casts = Casts(step, types, nodes, draft, SHORT_TYPES[policy.dtype], rates)
    if policy.is_pure:
        cast_inputs(casts)
    cast_reads(casts)
    cast_outputs(casts)
    is_short = types.is_short | short_gradients(casts)
    if policy.is_pure:
        is_short |= _lasting(step, types) & ~made_whole(casts)
    cast_gradients(casts, is_short, is_pure=policy.is_pure, is_scaled=policy.dtype == "fp16")
    cast_their_gradients(casts, is_short)
    # What the step before left, such as its outputs in a variable, has the type of what this step leaves.
    _, carrier = carried_over(step, types.is_float & (step.storages.created_op_id != NONE))
    is_left = types.is_float & (carrier != NONE) & (casts.freed[carrier] == NONE)
    is_short |= is_left & is_short[carrier]
    casts.settle()
    _shorten(draft, is_short, SHORT_TYPES[policy.dtype])
    at_most = own_casts is not OwnCasts.NONE
    short_workspaces(draft, step, types, is_short, policy.dtype, at_most=at_most)
    retime(draft, step, types, rates, policy.dtype)
    return draft.build()


def _lasting(step: Step, types: Types) -> Bools:
    """Finds storages of the weights' type: gradients, optimizer state but its counters, the optimizer's temporaries."""
    storages = step.storages
    has_shape = storages.shape != ""
    is_lasting = is_one_of(storages.category, LASTING) & has_shape
    created = storages.created_op_id
    in_optimizer = (created != NONE) & (step.ops.phase[created] == "optimizer") & has_shape
    is_lasting &= of_trained_models(step)
    short: Bools = types.is_float & (is_lasting | in_optimizer)
    return short


def _shorten(draft: Draft, is_short: Bools, dtype: str) -> None:
    """Changes storages of the recorded step to the short type."""
    storages = draft.storages
    rows = np.flatnonzero(is_short)
    requested, allocated, dtypes = (
        storages.requested_bytes.copy(),
        storages.allocated_bytes.copy(),
        storages.dtype.copy(),
    )
    requested[rows] //= 2
    allocated[rows] = np.where(allocated[rows] > 0, rounded(requested[rows], storages.device[rows]), 0)
    dtypes[rows] = dtype
    draft.storages = storages.replace(requested_bytes=requested, allocated_bytes=allocated, dtype=dtypes)
