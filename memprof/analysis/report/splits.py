"""Live memory at several moments of one step, split every way: names are looked up once for all moments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.analysis.report.breakdown import WORKSPACE, Holding
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.sources import Sources
from memprof.trace.files.coded import Coded
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: The kinds of split. ``storage``: each storage separately, by module, operator and occurrence.
KINDS = ("category", "module", "op", "source", "storage")

#: Name for what has no part of a kind.
NOTHING = "(none)"


class Splits:
    """The parts of a step's memory, by kind.

    The same parts as ``analysis.report.breakdown`` of one moment, by name, and each storage separately.
    """

    def __init__(self, step: Step, sources: Sources, tree: ModuleTree) -> None:
        """Encodes the part of every storage, and of every operator's own workspace."""
        storages, ops = step.storages, step.ops
        makers = storages.created_op_id
        op_name = Coded.of(ops.name)
        op_codes = np.append(op_name.codes, len(op_name.distinct)).astype(np.int64)
        stacks = np.append(ops.stack_id, NONE)
        category = Coded.of(storages.category)
        lines = [sources.of_stack(stack) for stack in range(len(step.stacks))]
        places = [NOTHING if line is None else line.place for line in lines]
        titles = [tree.title(node) for node in range(len(tree))]
        self._step = step
        # For each kind: names, the code of each storage, and of the workspace of each operator.
        self._names: dict[str, Sequence[str]] = {
            "category": [*category.distinct, WORKSPACE],
            "module": [*titles, NOTHING],
            "op": [*op_name.distinct, NOTHING],
            "source": [*places, NOTHING],
        }
        self._storages: dict[str, Ints] = {
            "category": category.codes.astype(np.int64),
            "module": tree.nodes_of(storages.module_id),
            "op": op_codes[makers],
            "source": stacks[makers],
        }
        self._workspaces: dict[str, Ints] = {
            "category": np.full(len(ops), NONE),
            "module": tree.nodes_of(ops.module_id),
            "op": op_codes,
            "source": stacks,
        }
        self._keys, self._key_of = self._code_keys(titles)

    def at(self, holding: Holding) -> dict[str, dict[str, int]]:
        """Splits the live memory at a moment of the step.

        Returns:
            Bytes by name, for each of KINDS; those of a kind sum to ``holding.total_bytes``.
        """
        parts = {kind: self._sum(kind, holding) for kind in self._names}
        parts["storage"] = self._each(holding)
        return parts

    def _sum(self, kind: str, holding: Holding) -> dict[str, int]:
        names = self._names[kind]
        sums = np.zeros(len(names), dtype=np.int64)
        np.add.at(sums, self._storages[kind][holding.rows], holding.bytes)  # NONE (-1) indexes the last entry
        sums[self._workspaces[kind][holding.op_id]] += holding.workspace_bytes
        parts: dict[str, int] = {}
        for code in np.flatnonzero(sums).tolist():  # several stacks may share a line
            parts[names[code]] = parts.get(names[code], 0) + int(sums[code])
        return {name: size for name, size in parts.items() if size}

    def _each(self, holding: Holding) -> dict[str, int]:
        """Names each storage by its operator and place, with its occurrence number.

        Storages of one operator have no recorded order: the smaller comes first.
        """
        keys = self._key_of[holding.rows]
        order = np.lexsort((holding.bytes, holding.makers, keys))
        ordered = keys[order]
        is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
        starts = np.flatnonzero(is_first)
        times = np.empty(len(keys), dtype=np.int64)
        times[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
        names = self._keys
        sums = {
            f"{names[key]} #{time + 1}": size
            for key, time, size in zip(keys.tolist(), times.tolist(), holding.bytes.tolist(), strict=True)
        }
        if holding.workspace_bytes:
            sums[f"workspace of {self._step.ops.name[holding.op_id]}"] = holding.workspace_bytes
        return sums

    def _code_keys(self, titles: Sequence[str]) -> tuple[list[str], Ints]:
        """Returns the storages' names without their number, and the index of each storage's name."""
        categories, ops = self._names["category"], self._names["op"]
        names = Coded.of(self._step.storages.name)
        # Encode name, category, module and operator as one number: there are far fewer combinations than storages.
        mixed = names.codes.astype(np.int64)
        for codes, count in (
            (self._storages["category"], len(categories)),
            (self._storages["module"] + 1, len(titles) + 1),
            (self._storages["op"], len(ops)),
        ):
            mixed = mixed * count + codes
        distinct, firsts, inverse = np.unique(mixed, return_index=True, return_inverse=True)
        keys: dict[str, int] = {}
        places = np.empty(len(distinct), dtype=np.int64)
        for place, row in enumerate(firsts.tolist()):
            name = names[row]
            category, node, op = (int(self._storages[kind][row]) for kind in ("category", "module", "op"))
            made = ops[op] if op < len(ops) - 1 else categories[category]
            module = titles[node] if node != NONE else ""
            key = f"{categories[category]} {name}" if name else " ".join(filter(None, (module, made)))
            places[place] = keys.setdefault(key, len(keys))
        return list(keys), places[inverse]
