"""What can be done with each module, what it frees at each moment and what it costs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from memprof.planners.search.groups import Group, are_apart, find_groups
from memprof.policies.base import Policy
from memprof.policies.plan.patterns import by_number
from memprof.trace.schema import Floats, Ints
from memprof.trace.step import Step

#: Builds the policy for some modules.
Maker = Callable[[tuple[str, ...]], Policy]

#: Moments at which bytes are compared, at most; of longer steps, the highest of each section.
_MOST_MOMENTS = 2048
#: Layers that free bytes within this distance are in the order of their choices.
_SAME_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Option:
    """One thing to do with any of some modules that run the same operators.

    Attributes:
        makers: Make the policies for those chosen.
        group: The group they belong to.
        members: Their names.
        sizes: A number for each; those whose operators make storages of the same sizes share one. Shape ``(members,)``.
    """

    makers: tuple[Maker, ...]
    group: Group
    members: tuple[str, ...]
    sizes: Ints

    def make(self, modules: tuple[str, ...]) -> tuple[Policy, ...]:
        """Makes the policies for some modules."""
        return tuple(maker(modules) for maker in self.makers)

    @property
    def family(self) -> tuple[object, ...]:
        """What it shares with its other settings: the modules and the kinds of policies."""
        return (self.members, *map(type, self.policies))

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies for all of them."""
        return self.make(self.group.pattern_for(self.members))


@dataclass(frozen=True, eq=False)
class Windows:
    """Times beside which copies run: the forward and the backward of each of the outermost modules.

    What is copied in a window beyond its time delays the step, since only few copies may be unfinished at a time.

    Attributes:
        work_us: Time each column copies in each window, less what it computes there and waits for anyway, which runs
            beside copies of others; shape ``(windows, columns)``.
        room_us: Time of each window without options, shape ``(windows,)``.
    """

    work_us: Floats
    room_us: Floats


@dataclass(frozen=True, eq=False)
class Effects:
    """The effects of options on single modules; one column for each pair of an option and a module.

    Attributes:
        frame: Policies of the whole step under which they were measured.
        options: The options.
        option_of: Option of each column, shape ``(columns,)``.
        modules: Module of each column.
        moments: Operators of the step without options at which bytes are compared, shape ``(moments,)``.
        live: Live bytes without options at each moment.
        freed: Bytes by which each column lowers them, negative where it raises them; ``(moments, columns)``.
        cost_us: Time each column adds to the step, shape ``(columns,)``.
        copy_us: Time for which each column copies, beside the computation.
        host_bytes: Pinned host memory that its copies take.
        windows: Where these copies run.
    """

    frame: tuple[Policy, ...]
    options: tuple[Option, ...]
    option_of: Ints
    modules: tuple[str, ...]
    moments: Ints
    live: Ints
    freed: Floats
    cost_us: Floats
    copy_us: Floats
    host_bytes: Floats
    windows: Windows

    @property
    def kinds(self) -> tuple[type[Policy], ...]:
        """The kinds of policies among the options."""
        return tuple(dict.fromkeys(type(policy) for option in self.options for policy in option.policies))

    def of_kind(self, kind: type[Policy]) -> Effects:
        """Returns the effects for choosing among the options of one kind of policy: the others cost infinitely much."""
        is_other = np.array([{*map(type, option.policies)} != {kind} for option in self.options])[self.option_of]
        return replace(self, cost_us=np.where(is_other, np.inf, self.cost_us))

    def columns_of(self, option: int) -> Ints:
        """Returns the columns of an option."""
        return np.flatnonzero(self.option_of == option)

    def peak(self, chosen: Ints) -> float:
        """Returns the highest live bytes with some columns chosen, added up."""
        return float((self.live - self.freed[:, chosen].sum(axis=1)).max())

    def policies(self, chosen: Ints) -> tuple[Policy, ...]:
        """Returns the policies of some columns, one for each distinct setting."""
        made = []
        for option in np.unique(self.option_of[chosen]).tolist():
            picked = self.options[option]
            names = {self.modules[column] for column in chosen[self.option_of[chosen] == option].tolist()}
            made += picked.make(picked.group.pattern_for(names))
        return merged(made)


def choose_moments(curves: Sequence[Ints]) -> Ints:
    """Returns the operators at which curves are compared: all, or of many the highest of each section in any curve."""
    count = len(curves[0])
    if count <= _MOST_MOMENTS:
        return np.arange(count)
    edges = np.linspace(0, count, _MOST_MOMENTS // 4 + 1).astype(np.int64)
    chosen: set[int] = set()
    for first, last in pairwise(edges.tolist()):
        highest = [first + int(np.argmax(curve[first:last])) for curve in curves]
        values, times = np.unique(highest, return_counts=True)
        chosen.update({highest[0], *values[np.argsort(-times, kind="stable")[:3]].tolist()})
    return np.array(sorted(chosen), dtype=np.int64)


def find_options(step: Step, kinds: Sequence[type[Policy]]) -> list[Option]:
    """Lists what some policies can do with the groups of a step.

    Members of a group that run different operators have options of their own. A policy for what modules make is also
    combined with one that handles the inputs they save: what runs again needs its inputs, which can be moved.
    """
    groups = find_groups(step)
    known = {group.pattern for group in groups}
    savers = [group for group in find_groups(step, with_inputs=True) if group.pattern not in known]
    found = []
    born = step.born_bytes()
    for group in (*groups, *savers):
        made = [tuple(born[call.start : call.stop].tolist()) for call in group.calls]
        numbers = {sizes: number for number, sizes in enumerate(dict.fromkeys(made))}
        sizes = np.array([numbers[one] for one in made])
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, call in enumerate(group.calls):
            alike.setdefault(tuple(step.ops.name[call.start : call.stop]), []).append(place)
        own = [kind for kind in kinds if kind.takes_inputs or group.pattern in known]
        for places in alike.values():
            members = tuple(group.members[place] for place in places)
            makers = {kind: kind.module_choices(step, group.calls[places[0]]) for kind in own}
            alone = [(maker,) for made_by in makers.values() for maker in made_by]
            first = [(kind.takes_inputs, made_by[0]) for kind, made_by in makers.items() if made_by]
            inner, outer = ([maker for takes, maker in first if takes == wanted] for wanted in (False, True))
            found += [Option(each, group, members, sizes[places]) for each in (*alone, *product(inner, outer))]
    return found


def merged(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Joins policies that differ in their modules alone."""
    found: dict[tuple[object, ...], Policy] = {}
    for policy in policies:
        fields = [field.name for field in dataclasses.fields(policy)]  # type: ignore[arg-type]  # policies are dataclasses
        key = (type(policy), *(getattr(policy, name) for name in fields if name != "modules"))
        known = found.get(key)
        modules = tuple(sorted((*getattr(known, "modules", ()), *getattr(policy, "modules", ())), key=by_number))
        found[key] = policy if known is None else replace(policy, modules=modules)  # type: ignore[type-var]
    return tuple(found.values())


def changed_at_random(effects: Effects, chosen: Ints, draw: random.Random) -> Ints:
    """Drops one of some chosen columns, adds one in place of those it excludes, or both."""
    kept, what = set(chosen.tolist()), draw.randrange(3)
    if kept and what != 0:
        kept.discard(draw.choice(sorted(kept)))
    if what != 1:
        column = draw.randrange(len(effects.modules))
        name = effects.modules[column]
        kept = {other for other in kept if are_apart([effects.modules[other]], [name])} | {column}
    return np.array(sorted(kept), dtype=np.int64)


def shorter(effects: Effects, chosen: Ints) -> Iterator[Ints]:
    """Yields columns that may take fewer settings than some chosen ones.

    Like choices are given to consecutive layers; an option is replaced by one of its kind and modules with fewer
    settings; and it is taken for all layers between its first and last, or for all that there are.
    """
    yield in_order(effects, chosen)
    settings = [len(option.policies[0].describe()) for option in effects.options]
    names = np.array(effects.modules, dtype=np.object_)
    for option in np.unique(effects.option_of[chosen]).tolist():
        columns = chosen[effects.option_of[chosen] == option]
        rest, whole = np.setdiff1d(chosen, columns), effects.columns_of(option)
        alike = [row for row, one in enumerate(effects.options) if one.family == effects.options[option].family]
        for other in sorted(alike, key=settings.__getitem__):
            if settings[other] < settings[option]:
                same = effects.columns_of(other)
                yield np.union1d(rest, same[np.isin(names[same], names[columns])])
        numbers = [by_number(name) for name in names[columns]]
        between = [column for column in whole if min(numbers) <= by_number(names[column]) <= max(numbers)]
        for more in (np.array(between), whole):
            taken = set(names[more])
            yield np.union1d(more, [column for column in rest if are_apart([names[column]], taken)]).astype(np.int64)


def in_order(effects: Effects, chosen: Ints) -> Ints:
    """Permutes the choices of repeated modules so that like ones are consecutive, those that free most first.

    Returns:
        As many columns; the same ones where the modules are not alike.
    """
    keys = list(zip(effects.option_of.tolist(), effects.modules, strict=True))
    column_of = {key: column for column, key in enumerate(keys)}
    found = set(chosen.tolist())
    for before, layers in _layers(effects).items():
        # What is chosen in each layer: options and the names inside it; and the most bytes that all of it frees.
        choices: dict[int, list[tuple[int, str]]] = {}
        freed: dict[int, float] = {}
        for number, columns in layers.items():
            own = [column for column in columns if column in found]
            start = len(f"{before}{number}")
            choices[number] = sorted((keys[column][0], keys[column][1][start:]) for column in own)
            freed[number] = float(effects.freed[:, own].sum(axis=1).max(initial=0.0))
        numbers = sorted(layers)
        order = sorted(numbers, key=lambda number: (-round(freed[number] / _SAME_BYTES), choices[number]))
        moved = [
            (option, f"{before}{number}{inside}")
            for number, other in zip(numbers, order, strict=True)
            for option, inside in choices[other]
        ]
        if all(key in column_of for key in moved):
            found -= {column for columns in layers.values() for column in columns}
            found |= {column_of[key] for key in moved}
    return np.array(sorted(found), dtype=np.int64)


def _layers(effects: Effects) -> dict[str, dict[int, list[int]]]:
    """Returns the columns of each layer: by the text before the first number that a pattern leaves open, and by it."""
    layers: dict[str, dict[int, list[int]]] = {}
    for column, name in enumerate(effects.modules):
        before, star, _ = effects.options[effects.option_of[column]].group.pattern.partition("*")
        if star:
            number = int(name[len(before) :].partition(".")[0])
            layers.setdefault(before, {}).setdefault(number, []).append(column)
    return layers
