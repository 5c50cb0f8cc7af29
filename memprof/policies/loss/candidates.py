"""Chunked losses that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.rewrite.stack_marks import is_in_compiled_code
from memprof.policies.runtime.model_names import module_names
from memprof.replay.live import live_bytes
from memprof.trace.operator_facts import CAST, LOG_SOFTMAX
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Fewest and most chunks; as many that the logits of one are at most this share of the step's peak.
_FEWEST, _MOST = 8, 64
_SHARE = 0.02

_NONE = "the step computes no cross-entropy: there are no logits to divide."
_COMPILED = (
    "the step computes no cross-entropy outside the code that torch.compile generates, where logits cannot be divided: "
    "compute the loss outside of what is compiled."
)


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns chunked losses: with each Linear that computes the input of a log-softmax, and without."""
    names, is_linear = module_names(step), linear_modules(step)
    softmax = (step.ops.name == LOG_SOFTMAX) & (step.ops.phase == "forward")
    if not softmax.any():
        chunked = ChunkedLoss(chunks=_FEWEST)
        return Candidates(unsuitable={chunked: _COMPILED if is_in_compiled_code(step).any() else _NONE})
    reads = step.uses.storage_id[softmax[step.uses.op_id] & (step.uses.role == "read")]
    logits = np.unique(np.append(reads, _cast_from(step, reads)))
    makers = np.unique(step.storages.module_id[logits])
    heads = [names[module] for module in makers if module != NONE and names[module] and is_linear[module]]
    chunks = _chunks(step, int(step.storages.allocated_bytes[reads].max(initial=0)))
    return Candidates((*(ChunkedLoss(chunks=chunks, head=head) for head in heads), ChunkedLoss(chunks=chunks)))


def _cast_from(step: Step, storages: Ints) -> Ints:
    """Returns what was cast to make storages, as a model does that computes its loss in float32."""
    makers = step.storages.created_op_id[storages]
    casts = makers[(makers != NONE) & (step.ops.name[makers] == CAST)]
    sources: Ints = step.uses.storage_id[np.isin(step.uses.op_id, casts) & (step.uses.role == "read")]
    return sources


def _chunks(step: Step, logits_bytes: int) -> int:
    """Returns the number of chunks in which logits of a size no longer matter for the peak."""
    chunks, small = _FEWEST, _SHARE * live_bytes(step).during.max()
    while chunks < _MOST and logits_bytes > small * chunks:
        chunks *= 2
    return chunks


def linear_modules(step: Step) -> Bools:
    """Marks the modules that are one torch Linear: a wrapper around one, such as an adapter's, has modules inside.

    Returns:
        One value for each row of ``step.modules``.
    """
    modules = step.modules
    found: Bools = (modules.type == "Linear") & ~np.isin(modules.module_id, modules.parent_id)
    return found
