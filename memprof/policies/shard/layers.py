"""Chooses the modules whose parameters are gathered together, by name."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.policies.plan.patterns import match_modules, outermost


def choose_units(
    patterns: tuple[str, ...], names: Sequence[str], types: Sequence[str], parents: Sequence[int]
) -> list[str]:
    """Returns the units of a model, none nested in another, without the root's own, "".

    Args:
        patterns: Patterns of the modules; if empty, the layers: the outermost modules numbered in a list or a sequence,
            except single operations such as ReLU in a sequence.
        names: Names of all modules.
        types: Their types.
        parents: Row of each module's parent, -1 for a root.

    Raises:
        PolicyError: A pattern matches no module.
    """
    if patterns:
        return [name for name in outermost(match_modules(patterns, names)) if name]
    has_children = {parent for parent in parents if parent >= 0}
    return outermost(
        [
            name
            for row, (name, kind, parent) in enumerate(zip(names, types, parents, strict=True))
            if name.rpartition(".")[2].isdigit()
            and kind != "ModuleList"
            and (row in has_children or (parent >= 0 and types[parent] == "ModuleList"))
        ]
    )
