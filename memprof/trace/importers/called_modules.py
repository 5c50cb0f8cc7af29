"""The modules of an imported history: calls, their nesting and the index of repeated layers, read off its stacks.

A snapshot has no modules. Its stacks show where each allocation's modules were called, and in which line each of them
was; that a call has ended and the next one has begun shows in a line further up than the last, or in a repetition.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import PureWindowsPath
from typing import NamedTuple

import numpy as np

from memprof.trace.importers.frames import NO_STACK, ModuleFrame, Stack
from memprof.trace.schema import NONE, Ints, ModuleCalls, Modules, Texts
from memprof.trace.source_lines import class_around

#: A container that calls one module after another in one line: a repetition inside it is not one of itself.
_CONTAINER = "torch/nn/modules/container.py"


@dataclass(frozen=True, eq=False)
class CalledModules:
    """The modules that a history shows.

    Attributes:
        modules: The modules; none has known parameters.
        calls: Their calls, in order.
        module_id: Innermost module of each row, NONE outside, shape ``(rows,)``.
    """

    modules: Modules
    calls: ModuleCalls
    module_id: Ints

    def of_rows(self, rows: Ints) -> Ints:
        """Returns the innermost module of some rows, NONE for NONE."""
        known = np.append(self.module_id, NONE)
        found: Ints = known[np.where((rows == NONE) | (rows >= len(self.module_id)), len(self.module_id), rows)]
        return found


@dataclass(eq=False)
class _Call:
    """One call: the rows in it, first and last included, and the calls inside.

    Attributes:
        file: File of its code.
        function: The function that runs.
        low: The first of the lines that were seen in it.
        site: Frames from the call around it.
        rows: Its rows.
        inside: Calls inside it.
        module: Number of its module, once known.
    """

    file: str
    function: str
    low: int
    site: tuple[str, ...]
    rows: list[int]
    inside: list[_Call] = field(default_factory=list)
    module: int = NONE


def find_modules(stacks: Sequence[Stack], steps: Ints, phases: Texts) -> CalledModules:
    """Returns the modules and calls of a history.

    Modules are named after their classes where the source files can be read here, else after file and first line seen.
    A module that is called several times in one call of the module around it, from one line, is several layers with an
    index. What backward runs again, from the innermost checkpoint on, are calls of the layers known from forward.
    """
    # A row outside all modules ends a call; one of another thread, without a stack, does not.
    outside = np.cumsum([not stack.modules and stack is not NO_STACK for stack in stacks])
    keys = zip(steps.tolist(), (phases == "backward").tolist(), outside.tolist(), range(len(stacks)), strict=False)
    inside = [key for key, stack in zip(keys, stacks, strict=False) if stack.modules]
    roots: list[_Call] = []
    for _, run in groupby(inside, key=itemgetter(0, 1, 2)):
        roots += _calls(stacks, [row for *_, row in run], 0)
    tree = _Tree()
    for root in roots:
        tree.add(root, is_repeated=phases[root.rows[0]] == "backward")
    module_id = np.full(len(stacks), NONE, dtype=np.int64)
    table: list[tuple[int, int, int, int, int]] = []
    for root in roots:
        _write(root, NONE, table, module_id, steps)
    columns = list(zip(*table, strict=True)) or [()] * 5
    calls = ModuleCalls.of(
        module_call_id=np.arange(len(table)),
        module_id=columns[0],
        parent_call_id=columns[1],
        step=columns[2],
        first_op_id=columns[3],
        last_op_id=columns[4],
        is_recompute=[phases[first] == "backward" for first in columns[3]],
    )
    return CalledModules(tree.table(), calls, module_id)


def _calls(stacks: Sequence[Stack], rows: list[int], level: int) -> list[_Call]:
    """Returns the calls of one level, with those inside them.

    Args:
        stacks: Stack of each row.
        rows: The rows of one call of the level above, in order; for level 0 those of one phase.
        level: Number of modules around.
    """
    runs: list[list[int]] = []
    last: ModuleFrame | None = None
    for row in rows:
        modules = stacks[row].modules
        frame = modules[level] if len(modules) > level else None
        if frame is not None:
            if last is None or frame.site != last.site or frame.file != last.file:
                runs.append([])
            runs[-1].append(row)
        last = frame  # a row of the module around, between two calls, separates them
    found: list[_Call] = []
    for own in (own for run in runs for own in _split(stacks, run, level)):
        first = stacks[own[0]].modules[level]
        low = min(stacks[row].modules[level].line for row in own)
        found.append(_Call(first.file, first.function, low, first.site, own, _calls(stacks, own, level + 1)))
    return found


def _split(stacks: Sequence[Stack], rows: list[int], level: int) -> list[list[int]]:
    """Splits the rows of calls of one module from one line where each call begins."""
    calls: list[list[int]] = []
    first = last = 0
    for row in rows:
        line = stacks[row].modules[level].line
        # Lines of one statement run in any order: only behind its first statement can a call have ended.
        if not calls or line <= first < last:
            calls.append([])
            first = line
        calls[-1].append(row)
        last = line
    if len(calls) > 1 or stacks[rows[0]].modules[level].file.replace("\\", "/").endswith(_CONTAINER):
        return calls
    period = _period([stacks[row].stack_id for row in rows])
    if period < 2 or period == len(rows) or _is_inside(stacks, rows, level):
        return calls
    return [rows[place : place + period] for place in range(0, len(rows), period)]


def _is_inside(stacks: Sequence[Stack], rows: list[int], level: int) -> bool:
    """Returns whether all rows are in calls of one module, from one line: then that one may be what is repeated."""
    inside = {
        (stack.modules[level].line, stack.modules[level + 1].site, stack.modules[level + 1].file)
        if len(stack.modules) > level + 1
        else None
        for stack in (stacks[row] for row in rows)
    }
    return len(inside) == 1 and None not in inside


def _period(values: list[int]) -> int:
    """Returns the length of the shortest part whose repetition is the whole, by Knuth, Morris and Pratt (1977)."""
    borders = [0] * len(values)
    length = 0
    for place in range(1, len(values)):
        while length and values[place] != values[length]:
            length = borders[length - 1]
        length += values[place] == values[length]
        borders[place] = length
    period = len(values) - borders[-1]
    return period if len(values) % period == 0 else len(values)


def _write(call: _Call, parent: int, table: list[tuple[int, int, int, int, int]], module_id: Ints, steps: Ints) -> None:
    """Adds a call and those inside it to a table, and its module to its rows."""
    own = len(table)
    table.append((call.module, parent, int(steps[call.rows[0]]), call.rows[0], call.rows[-1]))
    module_id[call.rows] = call.module
    for inside in call.inside:
        _write(inside, own, table, module_id, steps)


class _Key(NamedTuple):
    """A module below another: the frame that calls it, its code, and its index among those of one call.

    Attributes:
        site: The frame around the call; "" for a module without another around it.
        file: Its file.
        function: Its function.
        low: The first line that was seen in it.
        place: Number of the call of this code from this line, 0 first.
    """

    site: str
    file: str
    function: str
    low: int
    place: int


class _Tree:
    """The modules: each is identified by the module around it, the line that calls it, its code, and an index."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._key: list[_Key] = []
        self._found: dict[tuple[int, _Key], int] = {}
        #: Modules by file and first line, in the order of their calls since backward last ran any of them again.
        self._called: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._left: dict[tuple[str, int], list[int]] = {}

    def add(self, root: _Call, *, is_repeated: bool) -> None:
        """Finds the modules of a call that no other contains, and of those inside it."""
        if is_repeated:
            left = self._left.setdefault((root.file, root.low), list(self._called[root.file, root.low]))
            known = left.pop() if left else NONE
        else:
            known = NONE
            if self._left:  # a backward has run what was called before
                self._called.clear()
                self._left.clear()
        self._number(
            root, known if known != NONE else self._module(NONE, _Key("", root.file, root.function, root.low, 0))
        )

    def _number(self, call: _Call, module: int) -> None:
        call.module = module
        self._called[call.file, call.low].append(module)
        counted: dict[_Key, int] = defaultdict(int)
        for inside in call.inside:
            first = _Key(inside.site[0] if inside.site else "", inside.file, inside.function, inside.low, 0)
            self._number(inside, self._module(module, first._replace(place=counted[first])))
            counted[first] += 1

    def _module(self, parent: int, key: _Key) -> int:
        found = self._found.get((parent, key))
        if found is None:
            found = self._found[parent, key] = len(self._key)
            self._parent.append(parent)
            self._key.append(key)
        return found

    def table(self) -> Modules:
        """Returns the modules, named."""
        children: dict[int, list[int]] = defaultdict(list)
        for module, parent in enumerate(self._parent):
            children[parent].append(module)
        kinds = [_kind(key) for key in self._key]
        names = [""] * len(kinds)
        own = {one: name for parent in sorted(children) for one, name in self._names(children[parent], kinds).items()}
        count = Counter(own.values())
        for module, name in own.items():  # those around come first
            # A file and line need no name of what is around them.
            is_known = (parent := self._parent[module]) == NONE or (" " in kinds[module] and count[name] == 1)
            names[module] = name if is_known else f"{names[parent]}.{name}"
        return Modules.of(
            module_id=np.arange(len(kinds)),
            name=names,
            type=kinds,
            parent_id=self._parent,
            parameter_bytes=np.zeros(len(kinds)),
        )

    def _names(self, modules: list[int], kinds: list[str]) -> dict[int, str]:
        """Names the modules inside one other: an index where a line calls several, the line where several lines do."""
        sites: dict[str, set[tuple[str, int]]] = defaultdict(set)
        repeated = set()
        for module in modules:
            key = self._key[module]
            sites[kinds[module]].add((key.site, key.low))
            if key.place:
                repeated.add(key._replace(place=0))
        found = {}
        for module in modules:
            key, name = self._key[module], kinds[module]
            if len(sites[name]) > 1:
                line = key.site.rpartition(":")[0].rpartition(":")[2]
                name += f"@{line or key.low}"
            found[module] = f"{name}.{key.place}" if key._replace(place=0) in repeated else name
        return found


def _kind(key: _Key) -> str:
    """Returns the class of a module, by its source where that can be read; else its file, line and function."""
    found, path = class_around(key.file, key.low, key.function), PureWindowsPath(key.file)
    if found or "torch/nn/modules/" in path.as_posix():
        return found or path.stem.replace(".", "_")
    return f"{path.name or 'unknown'}:{key.low} {key.function}"
