"""Chunked losses that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.runtime.model_names import module_names
from memprof.trace.schema import NONE
from memprof.trace.step import Step

_CHUNKS = 8


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns chunked losses: with each module that computes the input of a log-softmax, and without."""
    names = module_names(step)
    softmax = (step.ops.name == "aten._log_softmax.default") & (step.ops.phase == "forward")
    if not softmax.any():
        return Candidates()
    reads = step.uses.storage_id[softmax[step.uses.op_id] & (step.uses.role == "read")]
    makers = np.unique(step.storages.module_id[reads])
    heads = [names[module] for module in makers if module != NONE and names[module]]
    return Candidates((*(ChunkedLoss(chunks=_CHUNKS, head=head) for head in heads), ChunkedLoss(chunks=_CHUNKS)))
