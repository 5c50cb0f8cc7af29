"""Operators whose outputs selective activation checkpointing keeps: their kinds, and which are worth it in a module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.errors import PolicyError
from memprof.trace.operator_facts import ATTENTION, LIFT, OPERATOR_KINDS, short_name
from memprof.trace.schema import Bools, Ints
from memprof.trace.step import Step

#: Why the output of a random operator is not kept.
RANDOM_REFUSAL = (
    "{name} draws random numbers and must run again for those after it to stay the same; leave it out of keep."
)


def changes_in_place(name: str) -> str:
    """Returns the sentence for a module whose forward cannot run again.

    Args:
        name: Its qualified name, "" for the model.
    """
    return (
        f"{name or 'The model'} changes an input or a buffer of its own in place, so its forward cannot run again; "
        "choose modules inside or around it that do not."
    )


#: One entry of ``keep``: a kind or an operator, the latter with the numbers of its calls or for all of them.
_CALLS = r"[1-9][0-9]{0,5}(?:-[1-9][0-9]{0,5})?"
_ENTRY = re.compile(rf"(?P<name>[^#]+)(?:#(?P<calls>{_CALLS}(?:\+{_CALLS})*))?")
#: As many calls in a row are written as a range.
_RANGE_FROM = 3


@dataclass(frozen=True)
class KeptOperators:
    """The operators of a region whose outputs are kept.

    Attributes:
        always: Names of operators kept at every call.
        calls: Names of operators kept at some calls only, with the numbers of these: 1 is an operator's first call in
            the region.
    """

    always: frozenset[str]
    calls: Mapping[str, frozenset[int]]

    @property
    def names(self) -> frozenset[str]:
        """All of these operators."""
        return self.always.union(self.calls)

    def __bool__(self) -> bool:
        """Returns whether any output is kept."""
        return bool(self.names)

    def has(self, name: str, call: int) -> bool:
        """Returns whether an operator's output is kept.

        Args:
            name: The operator's name.
            call: Number of the call in the region, from 1 on.
        """
        return name in self.always or call in self.calls.get(name, ())


def check_kinds(kinds: Iterable[str]) -> None:
    """Checks that each is a kind or looks like an operator's name, the latter with or without numbers of calls.

    Raises:
        PolicyError: One is neither; the message lists valid kinds.
    """
    for kind in kinds:
        entry = _ENTRY.fullmatch(kind)
        name = kind if entry is None else entry["name"]
        if name not in OPERATOR_KINDS and "." not in name:
            near = difflib.get_close_matches(name, OPERATOR_KINDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(OPERATOR_KINDS)}"
            raise PolicyError(f"unknown kind of operators {kind!r}; {hint} or a name such as aten.mm.default.")
        if entry is None or (name in OPERATOR_KINDS and entry["calls"]):
            raise PolicyError(
                f"cannot read {kind!r}: write the numbers of an operator's calls in the module after its name, such as "
                "aten.mm.default#1+3 for the first and the third, or #2-5."
            )


def kept_operators(kinds: Iterable[str]) -> KeptOperators:
    """Returns the operators that entries of ``keep`` name.

    Args:
        kinds: Kinds, or names of operators, these with or without numbers of calls; as ``check_kinds`` accepts them.
    """
    always: set[str] = set()
    calls: dict[str, set[int]] = {}
    for kind in kinds:
        name, _, numbers = kind.partition("#")
        if numbers:
            calls.setdefault(name, set()).update(_read_calls(numbers))
        else:
            always.update(OPERATOR_KINDS.get(name, (name,)))
    some = {name: frozenset(numbers) for name, numbers in calls.items() if name not in always}
    return KeptOperators(frozenset(always), some)


def _read_calls(numbers: str) -> set[int]:
    """Reads the numbers of calls: ``1+3-5``."""
    found: set[int] = set()
    for part in numbers.split("+"):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def spell_calls(numbers: Sequence[int]) -> str:
    """Spells rising numbers of calls, as an entry of ``keep`` has them behind ``#``: ``1+3-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) >= _RANGE_FROM else map(str, run)
    return "+".join(parts)


def short_kind(kind: str) -> str:
    """Shortens an entry of ``keep`` for a table: ``addmm#1+3`` for ``aten.addmm.default#1+3``."""
    name, number, calls = kind.partition("#")
    return short_name(name) + number + calls if number else kind


#: Number of sets proposed for a module: each has to be replayed.
MOST_SETS = 14

#: Kinds whose outputs are kept by their name, where all operators of the module of that kind are.
_NAMED_KINDS = ("attention", "conv", "matmul")


def kept_sets(step: Step, call: range) -> list[tuple[str, ...]]:
    """Returns values of ``keep`` for the operators of a module, from the fewest bytes kept to the most.

    Each set contains the one before it: operators are added by the time they take for each byte of their outputs, which
    solves the knapsack problem of what to keep up to its last operator (Dantzig 1957). Left out are operators that
    cannot be kept (in-place and random ones), and those that would not run again anyway.

    Args:
        step: The recorded step.
        call: The operators of one call of the module.
    """
    ops = np.arange(call.start, call.stop)
    ops = ops[may_be_kept(step, ops)]
    sizes = step.born_bytes()[ops]
    times = np.nan_to_num(step.ops.duration_us[ops])
    is_worth_it = (sizes > 0) & (times > 0)
    ops, sizes, times = ops[is_worth_it], sizes[is_worth_it], times[is_worth_it]
    if not len(ops):
        return []
    order = np.argsort(-times / sizes, kind="stable")
    ends = _spread(np.cumsum(times[order]), MOST_SETS)
    sets = (keep_entries(step, call, np.sort(ops[order[: end + 1]])) for end in ends)
    return list(dict.fromkeys(sets))


def may_be_kept(step: Step, ops: Ints) -> Bools:
    """Marks the operators whose outputs may be kept, and that checkpoint would otherwise run again."""
    saved, uses, storages = step.saved, step.uses, step.storages
    inside = (
        saved.forward_op_id[(saved.forward_op_id >= ops[0]) & (saved.forward_op_id <= ops[-1])] if len(ops) else ops
    )
    # The recompute stops at the operator that saves last, before its kernel unless it saves an output.
    last = int(inside.max(initial=-1))
    runs_again = ops < last
    outputs = saved.storage_id[saved.forward_op_id == last]
    runs_again |= (ops == last) & bool(np.any(storages.created_op_id[outputs] == last))

    is_change = (uses.role == "mutate") & (step.ops.phase[uses.op_id] == "forward")
    changed = storages.created_op_id[uses.storage_id[is_change]]
    is_changed_later = np.isin(ops, changed[changed < uses.op_id[is_change]])
    # lift_fresh only returns the tensor that torch.tensor made just before it, which is made again anyway.
    is_made = step.ops.name[ops] != LIFT
    is_random = step.ops.uses_rng[ops] & ~np.isin(step.ops.name[ops], ATTENTION)
    may: Bools = runs_again & is_made & ~step.ops.mutates[ops] & ~is_changed_later & ~is_random
    return may


def _spread(total: np.ndarray[tuple[int], np.dtype[np.float64]], most: int) -> Ints:
    """Chooses up to ``most`` positions of a growing sum, evenly over its values, the first and the last included."""
    if len(total) <= most:
        return np.arange(len(total))
    wanted = np.linspace(total[0], total[-1], most)
    return np.unique(np.searchsorted(total, wanted - 1e-9 * total[-1]))


def keep_entries(step: Step, call: range, kept: Ints) -> tuple[str, ...]:
    """Returns entries of ``keep`` for some operators of a call: kinds, operators, or numbers of their calls."""
    names = step.ops.name[call.start : call.stop]
    is_kept = np.zeros(len(names), dtype=np.bool_)
    is_kept[kept - call.start] = True
    entries: list[str] = []
    for name in dict.fromkeys(names[is_kept].tolist()):
        calls = is_kept[names == name]
        numbers = "" if calls.all() else "#" + spell_calls((np.flatnonzero(calls) + 1).tolist())
        entries.append(f"{name}{numbers}")
    for kind in _NAMED_KINDS:
        of_kind = [name for name in OPERATOR_KINDS[kind] if name in names]
        if of_kind and set(of_kind) <= set(entries):
            entries = [kind, *(entry for entry in entries if entry not in of_kind)]
    return tuple(sorted(entries))
