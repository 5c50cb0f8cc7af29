"""What imported allocations are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from memprof.machines.card import cublas_workspace_sizes
from memprof.trace.importers.frames import Stack
from memprof.trace.importers.kept_memory import count_states, data_sizes, find_replaced
from memprof.trace.schema import NONE, Bools, Ints, Texts

#: Threads that have a handle of cuBLAS of their own: forward's and backward's.
_HANDLES = 2
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

    @cached_property
    def _distinct(self) -> tuple[list[Stack], Ints]:
        stacks = {id(stack): stack for stack in self.stacks}
        places = {key: place for place, key in enumerate(stacks)}
        return list(stacks.values()), np.fromiter((places[id(stack)] for stack in self.stacks), np.int64)

    def of_stacks(self, read: Callable[[Stack], Any]) -> npt.NDArray[Any]:
        """Returns what is read from the stack of each row: many rows share one, and each is read once."""
        stacks, places = self._distinct
        return np.array([read(stack) for stack in stacks])[places]

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

    * A stack that assigns a gradient, sets up optimizer state or gives cuBLAS its workspace says so.
    * Weights and states that updates replace are those (``kept_memory.py``).
    * What an operator frees before anything else is allocated, beside its result, is a workspace; so are cuBLAS's,
      which have known sizes and stay.
    * Forward's memory is an activation if backward frees it, if it is dropped with its graph, or if the history ends
      before or in backward, as where memory runs out there; else temporary. Backward's is temporary if backward frees
      it, else a gradient. An update's is optimizer state if it stays, else temporary.
    * What is made outside all of these, before the first forward or by a module's own code, and stays, is a parameter;
      what backward frees is an activation (of a loss outside a module); what forward finds is input. What the end of
      the history cuts off is what other memory of the same stack is.
    * Memory from before the history that stays is parameters and optimizer state: of each size as many parameters as
      there are gradients, the rest state. What backward frees was an activation, anything else that goes a gradient.
    """
    count = len(lives.created)
    category, how = np.full(count, "unknown", dtype=object), np.full(count, "", dtype=object)
    born, gone, freed_in = lives.phases()

    def settle(mask: Bools, name: str, source: str) -> None:
        chosen = mask & (how == "")
        category[chosen], how[chosen] = name, source

    made, stays = lives.created != NONE, lives.freed == NONE
    sayings = ("makes_gradient", "gradient"), ("makes_state", "optimizer_state"), ("makes_workspace", "workspace")
    for attribute, name in sayings:
        says = lives.of_stacks(lambda stack, name=attribute: getattr(stack, name) is True)  # type: ignore[misc]
        settle(made & says[lives.created], name, BY_STACK)
    has_backward = bool((lives.phase == "backward").any())
    is_forward, is_backward, is_update, is_other, is_older = (
        born == name for name in ("forward", "backward", "optimizer", "other", "before")
    )
    backward_ends = _ends_of(lives, "backward")
    made_by_backward = _most_at_once(lives, is_backward & _spans(lives, "optimizer"), backward_ends)
    lines = lives.of_stacks(attrgetter("stack_id"))
    weights, states = find_replaced(lives.created, lives.freed, lives.size, lives.phase, lines, made_by_backward)
    settle(weights, "parameter", BY_PHASES)
    settle(states, "optimizer_state", BY_PHASES)
    settle(_are_cublas(lives, made & stays & ~is_update & (how == "")), "workspace", BY_SIZE)
    settle((is_forward | is_backward) & _beside_a_result(lives), "workspace", BY_PHASES)
    by_module = lives.of_stacks(attrgetter("makes_weights"))[lives.created]
    # A model may be loaded after another one has run.
    is_called = lives.of_stacks(lambda stack: bool(stack.modules))[lives.created]
    is_setup = is_other & stays & (_before_first(lives) & ~is_called | by_module)
    in_backward = (freed_in == "backward") & _spans(lives, "backward")
    ends_early = stays & (~_spans(lives, "backward") | (_ends_in(lives, "backward") & ~_spans(lives, "optimizer")))
    settle(is_forward & (in_backward | ends_early | _dies_with_graph(lives, is_forward)), "activation", BY_PHASES)
    settle(is_forward, "temporary", BY_PHASES)
    # Where updates allocate, gradients live until then: what goes at the end of backward is none.
    has_updates = bool((lives.phase == "optimizer").any())
    goes = (gone == "backward") | (has_updates & (freed_in == "backward"))
    settle(is_backward & goes & ~_spans(lives, "optimizer"), "temporary", BY_PHASES)
    if _ends_in(lives, "backward"):  # where memory ran out, say: gradients have the sizes of what stays
        kept = np.append(lives.size[stays & (is_older | is_setup)], lives.size[is_backward & ~stays & (how == "")])
        settle(is_backward & stays & ~np.isin(lives.size, kept), "temporary", BY_SIZE)
    settle(is_backward, "gradient", BY_PHASES)
    settle(is_update & stays, "optimizer_state", BY_PHASES)
    settle(is_update, "temporary", BY_PHASES)
    settle(is_setup & _are_data(lives, is_setup, by_module, category), "input", BY_SIZE)
    settle(is_setup, "parameter", BY_PHASES)
    settle(is_other & (gone == "backward"), "activation", BY_PHASES)
    is_loss = is_other & (_next_phases(lives, lives.created) == "backward")
    settle(is_other & ~is_loss & _spans(lives, "forward") & ~stays, "input", BY_PHASES)
    settle(is_other & (gone == "other"), "temporary", BY_PHASES)
    settle(is_older & (gone == "backward"), "activation", BY_PHASES)
    settle(is_older & ~stays & has_backward, "gradient", BY_PHASES)
    _settle_by_size(lives, is_older & stays & (how == ""), category, how)
    if has_backward or bool((lives.phase == "forward").any()):
        _settle_like_peers(lives, made & (how == ""), category, how)
        settle(is_other & ~is_loss & stays & _spans(lives, "forward"), "input", BY_PHASES)
        settle(((is_other | is_older) & ~stays) | is_loss, "temporary", BY_PHASES)
    return Purposes(category, how)


def _are_cublas(lives: Lives, mask: Bools) -> Bools:
    """Returns which lives of the history are cuBLAS's workspaces by their size and by the code that made them.

    Tensors have such sizes, too. A workspace's stack makes no others of that size, but names a product, or makes
    something just before or after: the product's result. What has no stack, or a power of two as its size, counts where
    few of it stay.
    """
    may, keys = lives.of_stacks(lambda stack: stack.makes_workspace is None), lives.of_stacks(attrgetter("stack_id"))
    is_product = lives.of_stacks(lambda stack: stack.operator != "")
    if (keys != NONE).any():
        pairs = keys[1:] == keys[:-1]
        is_product |= np.append(pairs, False) | np.append(False, pairs)
    for size in cublas_workspace_sizes():
        same = (lives.size == size) & (lives.created != NONE)
        found = np.flatnonzero(same & mask & may[lives.created])
        made_by = keys[lives.created[found]]
        is_few, is_odd = len(found) <= _HANDLES, size & (size - 1) != 0
        if not (is_few and is_odd):
            times = Counter(keys[lives.created[same]].tolist())
            alone = np.array([is_few if key == NONE else times[key] == 1 for key in made_by.tolist()], dtype=np.bool_)
            found = found[alone & is_product[lives.created[found]] & (is_few | is_odd)]
        if len(found):
            return np.isin(np.arange(len(mask)), found)
    return np.zeros(len(mask), dtype=np.bool_)


def _beside_a_result(lives: Lives) -> Bools:
    """Returns which lives end before anything else is allocated, while what their operator made next to them stays.

    Where others have one, what has no stack of Python's is on autograd's threads, and taken to have a result.
    """
    rows = len(lives.stacks)
    stays = np.zeros(rows, dtype=np.bool_)
    stays[lives.created[(lives.created != NONE) & (lives.freed != lives.created)]] = True
    operators, keys = lives.of_stacks(attrgetter("operator")), lives.of_stacks(attrgetter("stack_id"))
    is_bare = ~lives.of_stacks(attrgetter("is_python"))
    is_same = (operators[1:] == operators[:-1]) & (keys[1:] == keys[:-1])
    as_next = np.append(is_same & ((keys != NONE) | (operators != ""))[1:], False)
    has_result = is_bare & ~is_bare.all()
    has_result |= as_next & np.append(stays[1:], False)
    has_result[1:] |= as_next[:-1] & stays[:-1]
    found: Bools = (lives.created != NONE) & (lives.freed == lives.created) & has_result[lives.created]
    return found


def _settle_like_peers(lives: Lives, unknown: Bools, category: Texts, how: Texts) -> None:
    """Gives lives that the history's end cuts off the category of earlier ones with the same stack; in place."""
    peers: dict[int, Counter[str]] = {}
    keys = lives.of_stacks(attrgetter("stack_id"))[lives.created]
    known = np.flatnonzero((lives.created != NONE) & (how != "") & np.isin(keys, keys[unknown]) & (keys != NONE))
    for row in known.tolist():
        peers.setdefault(int(keys[row]), Counter())[str(category[row])] += 1
    for row in np.flatnonzero(unknown).tolist():
        own = peers.get(int(keys[row]))
        if own:
            category[row], how[row] = own.most_common(1)[0][0], BY_PHASES


def _settle_by_size(lives: Lives, kept: Bools, category: Texts, how: Texts) -> None:
    """Splits what is always there into parameters and optimizer state; changes both columns in place."""
    in_update = (category == "temporary") & (lives.created != NONE) & (lives.phase[lives.created] == "optimizer")
    counts = Counter(lives.size[kept].tolist())
    gradients = _most_at_once(lives, category == "gradient", _ends_of(lives, "backward"))
    for size in cublas_workspace_sizes():
        if not gradients and size & (size - 1) == 0:
            continue  # as large as many a weight of a model that is not trained
        extra = counts[size] % gradients[size] if gradients[size] else counts[size]
        if 0 < extra <= _HANDLES:
            rows = np.flatnonzero(kept & (lives.size == size))[:extra]
            category[rows], how[rows], kept[rows] = "workspace", BY_SIZE, False
            counts[size] -= extra
            break
    states = count_states(+counts, gradients, _most_at_once(lives, in_update))
    data = data_sizes(+counts, gradients, states)
    for size, count in (+counts).items():
        rows = np.flatnonzero(kept & (lives.size == size))
        category[rows], how[rows] = "input" if size in data else "parameter", BY_SIZE
        category[rows[count - states[size] :]] = "optimizer_state"


def _are_data(lives: Lives, kept: Bools, by_module: Bools, category: Texts) -> Bools:
    """Returns which lives that a job's setup keeps are data, by their sizes and by the code that made them."""
    counts = Counter(lives.size[kept].tolist())
    gradients = _most_at_once(lives, category == "gradient", _ends_of(lives, "backward"))
    sizes = data_sizes(counts, gradients, {}) - set(lives.size[kept & by_module].tolist())
    return kept & np.isin(lives.size, list(sizes))


def _most_at_once(lives: Lives, mask: Bools, ends: Ints | None = None) -> Counter[int]:
    """Returns how many lives of each size exist at once at most.

    Args:
        lives: The lives.
        mask: Those to count, shape ``(lives,)``.
        ends: Count only after these rows, if any life exists then: what is added to another gradient is gone.
    """
    chosen = np.flatnonzero(mask)
    begin, stop = lives.created[chosen], np.where(lives.freed[chosen] == NONE, len(lives.phase), lives.freed[chosen])
    # What is freed after a row exists in it.
    at, gone = begin, stop + 1
    if ends is not None and any(((begin <= row) & (stop > row)).any() for row in ends.tolist()):
        at, gone = ends, stop
    most: Counter[int] = Counter()
    for size in np.unique(lives.size[chosen]).tolist():
        own = lives.size[chosen] == size
        starts, stops = np.sort(begin[own]), np.sort(gone[own])
        most[size] = int((np.searchsorted(starts, at, side="right") - np.searchsorted(stops, at, side="right")).max())
    return most


def _ends_of(lives: Lives, name: str) -> Ints:
    """Returns the last row of each run of rows of a phase."""
    inside = lives.phase == name
    return np.flatnonzero(inside & ~np.append(inside[1:], False)).astype(np.int64)


#: As many lives end at once where a graph is dropped.
_GRAPH = 16


def _spans(lives: Lives, name: str) -> Bools:
    """Returns which lives have a row of a phase between their first and their last."""
    rows = np.append(0, np.cumsum(lives.phase == name))
    first = np.maximum(lives.created, 0)
    last = np.where(lives.freed == NONE, len(lives.phase) - 1, lives.freed)
    return np.asarray(rows[last + 1] - rows[np.minimum(first, last)] > 0)


def _next_phases(lives: Lives, after: Ints) -> Texts:
    """Returns the first phase but other after some rows; "" where there is none, shape as ``after``."""
    rows = np.append(np.flatnonzero(lives.phase != "other"), len(lives.phase))
    phases = np.append(lives.phase, "").astype(object)
    following: Texts = phases[rows[np.searchsorted(rows, after + 1)]]
    return following


def _ends_in(lives: Lives, name: str) -> bool:
    """Returns whether the last row of forward, backward or an update is of one phase."""
    rows = lives.phase[lives.phase != "other"]
    return bool(len(rows)) and rows[-1] == name


def _dies_with_graph(lives: Lives, mask: Bools) -> Bools:
    """Returns which lives end together with many others: a graph was dropped without backward."""
    ends = np.bincount(lives.freed[mask & (lives.freed != NONE)], minlength=len(lives.phase))
    dropped: Bools = (lives.freed != NONE) & (ends[np.maximum(lives.freed, 0)] >= _GRAPH)
    # What goes before a backward is not of its graph, such as the parts of a stacked output.
    dropped &= _next_phases(lives, lives.freed) != "backward"
    return dropped


def _before_first(lives: Lives) -> Bools:
    """Returns which lives begin before the first forward, or without any, the first backward; none without both."""
    rows = np.flatnonzero(lives.phase == "forward")
    rows = rows if len(rows) else np.flatnonzero(lives.phase == "backward")
    return np.asarray(lives.created < (int(rows[0]) if len(rows) else 0))
