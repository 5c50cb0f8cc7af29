"""Rewrites the cross-entropies of a recorded step into chunked ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.loss.emit_backward import Emitter
from memprof.policies.loss.recorded import CrossEntropy, Head, linear_modules
from memprof.policies.plan.patterns import match_modules
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import Insertion
from memprof.policies.rewrite.stack_marks import is_in_transform
from memprof.trace.schema import NONE, Ints, Saved
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.loss.policy import ChunkedLoss

_LOG_SOFTMAX = "aten._log_softmax.default"
_NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_OF_SOFTMAX = {
    _LOG_SOFTMAX,
    *_NLL,
    "aten.detach.default",
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    "aten._log_softmax_backward_data.default",
}
_VIEWS = {f"aten.{name}" for name in ("view.default", "_unsafe_view.default", "t.default", "transpose.int")}
_VIEWS |= {f"aten.{name}" for name in ("detach.default", "slice.Tensor", "alias.default", "permute.default")}


def transform(step: Step, policy: ChunkedLoss) -> Step:
    """Replaces every cross-entropy on large logits by a chunked one.

    Raises:
        PolicyError: There is none, or the head does not make the logits of any.
    """
    is_likelihood = np.isin(step.ops.name, _NLL) & (step.ops.phase == "forward") & ~is_in_transform(step)
    large = [
        one
        for likelihood in np.flatnonzero(is_likelihood)
        if (one := _cross_entropy(step, int(likelihood), has_head=bool(policy.head))) is not None
        and step.storages.allocated_bytes[one.logits] >= policy.minimum_bytes
    ]
    found = [one for one in large if _is_one_call(step, one)]
    if large and not found:
        raise PolicyError(
            "The job computes its loss in two calls, log_softmax and then nll_loss; only cross_entropy, which does "
            "both, can be computed in chunks. Return the logits from the model, and call cross_entropy on them."
        )
    if not found:
        raise PolicyError(
            f"The step has no cross-entropy on logits of {policy.minimum_bytes:,} bytes or more that is differentiated "
            "in it outside of torch.func; the loss policy would change nothing (minimum_bytes sets the limit)."
        )
    heads = [_head(step, one, policy) if policy.head else None for one in found]
    if policy.head and not any(heads):
        raise PolicyError(
            f"{policy.head!r} does not make the logits of a cross-entropy, or other operators read them; name the "
            "Linear whose output goes into it, or leave the head out."
        )
    draft = Draft(step)
    for one, head in zip(found, heads, strict=True):
        _rewrite(draft, step, policy, one, head)
    draft.remove_storages(_left_behind(step, [one.logits for one, head in zip(found, heads, strict=True) if head]))
    return draft.build()


def _left_behind(step: Step, logits: list[int]) -> Ints:
    """Returns the logits that the previous step left, which disappear together with this step's.

    A loop that writes ``logits, loss = model(x, y)`` holds them until it has the next ones.

    Args:
        step: The step.
        logits: Storages of the logits that are never whole under the policy.
    """
    storages = step.storages
    lasting = [one for one in logits if storages.freed_op_id[one] == NONE]
    is_used = np.zeros(len(storages), dtype=np.bool_)
    is_used[step.uses.storage_id] = True
    is_left = (storages.created_op_id == NONE) & (storages.freed_op_id != NONE) & ~is_used
    is_left &= np.isin(storages.category, ("activation", "temporary", "unknown"))
    alike = np.flatnonzero(is_left & np.isin(storages.requested_bytes, storages.requested_bytes[lasting]))
    return alike[: len(lasting)]


def _is_one_call(step: Step, one: CrossEntropy) -> bool:
    """Returns whether softmax and likelihood belong to a single call of torch's cross_entropy."""
    softmax, likelihood = step.ops.stack_id[[one.log_softmax, one.likelihood]].tolist()
    return bool(softmax == likelihood or NONE in (softmax, likelihood))


def _rewrite(draft: Draft, step: Step, policy: ChunkedLoss, one: CrossEntropy, head: Head | None) -> None:
    """Replaces a cross-entropy with a chunked one."""
    removed = one.removed if head is None else np.union1d(one.removed, head.removed)
    durations = np.nan_to_num(step.ops.duration_us)
    pace = step.duration_us / max(durations.sum(), 1e-9)
    insertion = Insertion(draft)
    emitter = Emitter(insertion, step, policy, one, head)
    emitter.forward()
    last_forward = insertion.next_op - 1
    emitter.backward()
    last_backward = insertion.next_op - 1
    insertion.write()
    draft.duration_us += pace * (insertion.duration_us - durations[removed].sum())

    storages = draft.storages
    created, freed = storages.created_op_id.copy(), storages.freed_op_id.copy()
    known = slice(0, len(step.storages))
    # What died with an operator of the old form dies with the new form's last operator in that phase: frames of
    # Python hold it until cross_entropy returns, the node until it has run.
    dies = np.isin(freed[known], removed)
    in_backward = step.ops.phase[np.where(dies, freed[known], 0)] == "backward"
    freed[known][dies] = np.where(in_backward, last_backward, last_forward)[dies]
    for storage, op_id in emitter.made.items():
        created[storage] = op_id
    for storage in emitter.kept:  # kept for backward, by the node alone from now on
        dies_early = freed[storage] == last_forward or NONE < freed[storage] < one.backward[-1]
        freed[storage] = last_backward if dies_early else freed[storage]
    draft.storages = storages.replace(created_op_id=created, freed_op_id=freed)
    kept = np.asarray(emitter.kept, dtype=np.int64)
    draft.insert_saved(
        Saved.of(
            storage_id=kept,
            forward_op_id=np.maximum(emitter.first_forward, created[kept]),
            module_id=np.full(len(kept), NONE),
            released_op_id=np.full(len(kept), last_backward),
        )
    )
    draft.remove_ops(removed)
    draft.remove_storages(one.whole if head is None else np.union1d(one.whole, head.whole))


def _cross_entropy(step: Step, likelihood: int, *, has_head: bool) -> CrossEntropy | None:
    """Recognises a cross-entropy by its likelihood; None where it is another loss, or is not differentiated.

    Args:
        step: The step.
        likelihood: Operator of the negative log-likelihood.
        has_head: Whether the logits are computed in chunks, and with them what casts them to float32.
    """
    uses, storages, ops = step.uses, step.storages, step.ops
    read, written = _touched(step, likelihood)
    by_softmax = read[ops.name[storages.created_op_id[read]] == _LOG_SOFTMAX]
    by_softmax = by_softmax[storages.created_op_id[by_softmax] != NONE]
    if len(by_softmax) != 1:
        return None
    softmax = int(by_softmax[0])
    log_softmax = int(storages.created_op_id[softmax])
    users = np.unique(uses.op_id[uses.storage_id == softmax])
    if not set(ops.name[users]) <= _OF_SOFTMAX:
        return None  # something else looks at it: label smoothing, or the user's own loss
    is_backward = (ops.forward_op_id == likelihood) | (ops.forward_op_id == log_softmax)
    backward = np.flatnonzero(is_backward & np.isin(ops.name, list(_OF_SOFTMAX)))
    if not len(backward):
        return None
    logits = int(_touched(step, log_softmax)[0][0])
    made = np.flatnonzero(np.isin(storages.created_op_id, backward))
    gradient = made[storages.created_op_id[made] == backward[-1]]
    if not len(gradient):
        return None
    used = np.unique(uses.storage_id[np.isin(uses.op_id, backward)])
    earlier = used[~np.isin(used, made)]
    loss = written[storages.freed_op_id[written] != storages.created_op_id[written]]
    upstream = [s for s in earlier if storages.created_op_id[s] > likelihood]
    saved_weight = [s for s in written if s in earlier]
    losses = [s for s in loss if s not in saved_weight]
    whole = np.concatenate([[softmax], made[~np.isin(made, gradient)], saved_weight]).astype(np.int64)
    removed = np.concatenate([users, [log_softmax, likelihood], backward])
    # Not those of the logits themselves, whose first dimension may be the batch.
    rows = str(storages.shape[softmax]) or str(storages.shape[gradient[-1]]) or str(storages.shape[logits])
    source = _cast_of(step, logits, removed, log_softmax, by_model=has_head)
    is_cast_by_model = source is not None and int(storages.created_op_id[logits]) != log_softmax - 1
    if source is not None:
        cast = int(storages.created_op_id[logits])
        readers = uses.op_id[uses.storage_id == gradient[-1]]
        # A predicted cast stands before the views of the logits, and its backward belongs to their reader.
        is_back = ops.forward_op_id == cast
        is_back[readers[(ops.name[readers] == "aten._to_copy.default") & (ops.phase[readers] == "backward")]] = True
        cast_backward = np.flatnonzero(is_back)
        narrow = np.flatnonzero(np.isin(storages.created_op_id, cast_backward))
        if len(narrow):
            whole = np.concatenate([whole, [logits], gradient])
            removed = np.concatenate([removed, [cast], cast_backward])
            backward = np.concatenate([backward, cast_backward])
            logits, gradient = source, narrow
    return CrossEntropy(
        log_softmax=log_softmax,
        likelihood=likelihood,
        backward=np.sort(backward),
        logits=logits,
        whole=whole,
        gradient=int(gradient[-1]),
        targets=np.setdiff1d(read, by_softmax),
        loss=int(losses[0]) if losses else int(written[0]),
        upstream=int(upstream[0]) if upstream else NONE,
        removed=np.unique(removed),
        rows=int(rows.partition("x")[0]),
        is_cast_by_model=is_cast_by_model,
    )


def _cast_of(step: Step, logits: int, removed: Ints, log_softmax: int, *, by_model: bool) -> int | None:
    """Returns what was cast to make the logits; None where nothing was, or others read the result.

    Args:
        step: The step.
        logits: Storage that the log-softmax reads.
        removed: Operators of the cross-entropy.
        log_softmax: Its first.
        by_model: Include a cast of the model's own, ``logits.float()``; else only autocast's, directly before.
    """
    uses, ops = step.uses, step.ops
    created = int(step.storages.created_op_id[logits])
    if created == NONE or ops.name[created] != "aten._to_copy.default":
        return None
    if created != log_softmax - 1:
        others = np.setdiff1d(uses.op_id[uses.storage_id == logits], np.append(removed, created))
        others = others[~np.isin(ops.name[others], list(_VIEWS)) & (ops.forward_op_id[others] != created)]
        if not by_model or len(others) or step.storages.dtype[logits] != "float32":
            return None
    return int(_touched(step, created)[0][0])


def _head(step: Step, one: CrossEntropy, policy: ChunkedLoss) -> Head | None:
    """Recognises the Linear that makes the logits; None where another module does, or others look at the logits."""
    uses, storages, ops, calls = step.uses, step.storages, step.ops, step.module_calls
    chosen = match_modules([policy.head], [str(name) for name in step.modules.name])
    is_chosen = np.isin(step.modules.name, chosen) & linear_modules(step)
    inside = is_chosen[calls.module_id] & (calls.first_op_id != NONE)
    maker = int(storages.created_op_id[one.logits])
    around = np.flatnonzero(inside & (calls.first_op_id <= maker) & (calls.last_op_id >= maker))
    if maker == NONE or not len(around):
        return None
    call = int(around[-1])
    forward = np.arange(calls.first_op_id[call], calls.last_op_id[call] + 1)
    made = np.flatnonzero(np.isin(storages.created_op_id, forward))
    users = np.unique(uses.op_id[np.isin(uses.storage_id, [one.logits, one.gradient])])
    views = users[np.isin(ops.name[users], list(_VIEWS)) & ~np.isin(users, forward)]
    chain = np.union1d(forward, views)
    backward = np.flatnonzero(np.isin(ops.forward_op_id, chain))
    others = np.setdiff1d(users, np.concatenate([chain, backward, one.removed]))
    if len(others):
        return None
    # Of what it copies or keeps beside the logits, only a copy of its input outlives it.
    inputs = np.unique(uses.storage_id[np.isin(uses.op_id, forward)])
    inputs = inputs[~np.isin(inputs, made)]
    is_parameter = storages.category[inputs] == "parameter"
    born = np.flatnonzero(np.isin(storages.created_op_id, backward))
    outside = np.unique(uses.storage_id[~np.isin(uses.op_id, backward)])
    is_lasting = np.isin(born, outside) | (storages.category[born] == "gradient")
    lasting = born[is_lasting]
    # A block of a device may be larger than another for the same request: what the allocator did not split off.
    sizes = storages.requested_bytes
    parameters = inputs[is_parameter]
    parameters = parameters[np.argsort(-sizes[parameters], kind="stable")]
    is_of_parameter = np.isin(sizes[lasting], sizes[parameters]) & (
        (storages.category[lasting] == "gradient") | ~np.isin(sizes[lasting], sizes[inputs[~is_parameter]])
    )
    of_parameters = lasting[is_of_parameter]
    of_parameters = of_parameters[np.argsort(-sizes[of_parameters], kind="stable")]
    of_hidden = lasting[~is_of_parameter]
    hidden = inputs[~is_parameter]
    copied = made[np.isin(ops.name[storages.created_op_id[made]], ("aten.clone.default",))]
    casts = made[ops.name[storages.created_op_id[made]] == "aten._to_copy.default"]
    casts = casts[[bool(np.isin(_touched(step, storages.created_op_id[cast])[0], parameters).any()) for cast in casts]]
    if len(hidden) != 1 or not len(parameters) or len(of_hidden) > 1:
        return None
    detached = np.flatnonzero((ops.forward_op_id == NONE) & (ops.phase == "backward"))
    removed = np.concatenate([chain, backward])
    return Head(
        removed=np.setdiff1d(removed, detached),
        hidden=int(hidden[0]),
        copied=int(copied[0]) if len(copied) else NONE,
        casts=casts,
        parameters=parameters,
        of_hidden=int(of_hidden[0]) if len(of_hidden) else NONE,
        of_parameters=of_parameters,
        whole=np.concatenate(
            [np.setdiff1d(made, np.append(copied, casts)), np.setdiff1d(born, lasting), [one.gradient, one.logits]]
        ).astype(np.int64),
        flops=int(ops.flops[forward].sum()),
        forward_us=float(np.nansum(ops.duration_us[forward])),
        backward_us=float(np.nansum(ops.duration_us[backward])),
        module_id=int(calls.module_id[call]),
    )


def _touched(step: Step, op_id: int) -> tuple[Ints, Ints]:
    """Returns the storages an operator reads and those it makes."""
    rows = slice(*np.searchsorted(step.uses.op_id, [op_id, op_id + 1]))
    storages, roles = step.uses.storage_id[rows], step.uses.role[rows]
    made = np.flatnonzero(step.storages.created_op_id == op_id)
    return np.unique(storages[(roles == "read") & ~np.isin(storages, made)]), made
