"""What imported allocations are for, from the phases in which they are made and freed, and from sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.trace.importers.stacks.frames import Stack
from memprof.trace.schema import NONE, Bools, Ints, Texts

#: Workspaces that torch keeps for each handle of cuBLAS (at::cuda::getChosenWorkspaceSize), Hopper's last.
_CUBLAS_BYTES = (8_519_680, 33_554_432)

#: How a category was determined, values of ``schema.CATEGORY_SOURCES``.
BY_STACK, BY_PHASES, BY_SIZE, BY_PROFILER = "stack", "phases", "size", "profiler"


@dataclass(frozen=True, eq=False)
class Purposes:
    """Categories of lives, and how each was determined; shape ``(lives,)`` each.

    Attributes:
        category: Category.
        how: One of the constants above, "" where the category is unknown.
    """

    category: Texts
    how: Texts


@dataclass(frozen=True, eq=False)
class Lives:
    """What is known of each life; shape ``(lives,)`` each but the last two, of shape ``(rows,)``.

    Attributes:
        created: Row that made it; NONE if it is older than the history.
        freed: Row after which it was freed; NONE if it is alive at the end.
        size: Requested bytes.
        phase: Phase of each row.
        stacks: Stack of each row.
    """

    created: Ints
    freed: Ints
    size: Ints
    phase: Texts
    stacks: Sequence[Stack]

    def phases(self) -> tuple[Texts, Texts, Texts]:
        """Returns the phases in which each life begins and ends, and that of the last row before its end.

        They are ``before`` and ``after`` where it begins before the history or does not end in it.
        """
        born = np.where(self.created == NONE, "before", self.phase[self.created]).astype(object)
        # What is freed after the last row of a phase is freed by what follows.
        following = np.append(self.phase[1:], self.phase[-1:])
        gone = np.where(self.freed == NONE, "after", following[self.freed]).astype(object)
        same = (self.freed != NONE) & (self.freed == self.created)
        gone[same] = born[same]
        freed_in = np.where(self.freed == NONE, "after", self.phase[self.freed]).astype(object)
        return born, gone, freed_in


def find_purposes(lives: Lives) -> Purposes:
    """Determines categories.

    * A stack that assigns a gradient or sets up optimizer state says so.
    * What is freed before anything else is allocated is a workspace; so are cuBLAS's, which have known sizes and stay.
    * Forward's memory is an activation if backward frees it, if it is dropped with its graph, or if the history ends
      before or in backward, as where memory runs out there; else temporary. Backward's is temporary if backward frees
      it, else a gradient. An update's is optimizer state if it stays, else temporary.
    * What is made outside all of these, before the first forward, and stays, is a parameter; what backward frees is an
      activation (of a loss outside a module); what forward finds is input.
    * Memory from before the history that stays is parameters and optimizer state: of each size as many parameters as
      there are gradients, the rest state. What backward frees was an activation, anything else that goes a gradient.

    Args:
        lives: The lives.
    """
    count = len(lives.created)
    category, how = np.full(count, "unknown", dtype=object), np.full(count, "", dtype=object)
    born, gone, freed_in = lives.phases()

    def settle(mask: Bools, name: str, source: str) -> None:
        chosen = mask & (how == "")
        category[chosen], how[chosen] = name, source

    made, stays = lives.created != NONE, lives.freed == NONE
    for attribute, name in (("makes_gradient", "gradient"), ("makes_state", "optimizer_state")):
        says = np.array([getattr(stack, attribute) for stack in lives.stacks], dtype=np.bool_)
        settle(made & says[lives.created], name, BY_STACK)
    has_backward = bool((lives.phase == "backward").any())
    is_forward, is_backward, is_update, is_other, is_older = (
        born == name for name in ("forward", "backward", "optimizer", "other", "before")
    )
    settle(stays & ~is_update & np.isin(lives.size, _CUBLAS_BYTES), "workspace", BY_SIZE)
    settle((is_forward | is_backward) & (lives.freed == lives.created), "workspace", BY_PHASES)
    in_backward = (freed_in == "backward") & _spans(lives, "backward")
    ends_early = stays & (~_spans(lives, "backward") | (_ends_in(lives, "backward") & ~_spans(lives, "optimizer")))
    settle(is_forward & (in_backward | ends_early | _dies_with_graph(lives, is_forward)), "activation", BY_PHASES)
    settle(is_forward, "temporary", BY_PHASES)
    # Where updates allocate, gradients live until then: what goes at the end of backward is none.
    has_updates = bool((lives.phase == "optimizer").any())
    goes = (gone == "backward") | (has_updates & (freed_in == "backward"))
    settle(is_backward & goes & ~_spans(lives, "optimizer"), "temporary", BY_PHASES)
    settle(is_backward, "gradient", BY_PHASES)
    settle(is_update & stays, "optimizer_state", BY_PHASES)
    settle(is_update, "temporary", BY_PHASES)
    settle(is_other & stays & _before_first(lives, "forward"), "parameter", BY_PHASES)
    settle(is_other & (gone == "backward"), "activation", BY_PHASES)
    settle(is_other & _spans(lives, "forward") & ~stays, "input", BY_PHASES)
    settle(is_other & (gone == "other"), "temporary", BY_PHASES)
    settle(is_older & (gone == "backward"), "activation", BY_PHASES)
    settle(is_older & ~stays & has_backward, "gradient", BY_PHASES)
    _settle_by_size(lives, is_older & stays & (how == ""), category, how)
    return Purposes(category, how)


def _settle_by_size(lives: Lives, kept: Bools, category: Texts, how: Texts) -> None:
    """Splits what is always there into parameters and optimizer state; changes both columns in place."""
    gradients = np.flatnonzero(category == "gradient")
    most: Counter[int] = Counter()
    if len(gradients):
        # Of several steps, the one with the most gradients of a size.
        ends = np.where(lives.freed[gradients] == NONE, len(lives.phase), lives.freed[gradients])
        for size in np.unique(lives.size[gradients]).tolist():
            own = lives.size[gradients] == size
            starts, stops = np.sort(lives.created[gradients][own]), np.sort(ends[own])
            alive = np.arange(1, len(starts) + 1) - np.searchsorted(stops, starts, side="right")
            most[size] = int(alive.max())
    counts = Counter(lives.size[kept].tolist())
    # Every trained parameter has as many states: as few as a size of trained parameters alone leaves.
    states = min(
        (round(counts[size] / most[size]) - 1 for size in counts if most[size] and size >= _LEAST_BYTES), default=0
    )
    for size, count in counts.items():
        rows = np.flatnonzero(kept & (lives.size == size))
        # Those of no gradient's size are not trained; counts of updates are as small as can be.
        is_count = bool(most) and not most[size] and size <= _STEP_COUNT_BYTES
        own = count if is_count else min(max(states, 0) * most[size], count)
        category[rows], how[rows] = "parameter", BY_SIZE
        category[rows[count - own :]] = "optimizer_state"


#: Smaller tensors have sizes that others have by chance.
_LEAST_BYTES = 4096
#: Counts of updates, one for each parameter, are at most this large.
_STEP_COUNT_BYTES = 8


#: As many lives end at once where a graph is dropped.
_GRAPH = 16


def _spans(lives: Lives, name: str) -> Bools:
    """Returns which lives have a row of a phase between their first and their last."""
    rows = np.append(0, np.cumsum(lives.phase == name))
    first = np.maximum(lives.created, 0)
    last = np.where(lives.freed == NONE, len(lives.phase) - 1, lives.freed)
    return np.asarray(rows[last + 1] - rows[np.minimum(first, last)] > 0)


def _ends_in(lives: Lives, name: str) -> bool:
    """Returns whether the last row of forward, backward or an update is of one phase."""
    rows = lives.phase[lives.phase != "other"]
    return bool(len(rows)) and rows[-1] == name


def _dies_with_graph(lives: Lives, mask: Bools) -> Bools:
    """Returns which lives end together with many others: a graph was dropped without backward."""
    ends = np.bincount(lives.freed[mask & (lives.freed != NONE)], minlength=len(lives.phase))
    dropped: Bools = (lives.freed != NONE) & (ends[np.maximum(lives.freed, 0)] >= _GRAPH)
    return dropped


def _before_first(lives: Lives, name: str) -> Bools:
    rows = np.flatnonzero(lives.phase == name)
    return np.asarray(lives.created < (int(rows[0]) if len(rows) else len(lives.phase)))
