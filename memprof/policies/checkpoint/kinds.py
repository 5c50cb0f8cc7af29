"""The kinds of operators whose outputs selective activation checkpointing may keep."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memprof.errors import PolicyError
from memprof.trace.operator_facts import OPERATOR_KINDS, short_name

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
        f"{name or 'the model'} changes an input or a buffer of its own in place, so its forward cannot run again; "
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
