"""What a snapshot notes: metadata of allocations, annotations of tensors, phases, and all that an export writes."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.phases import MOST_NAMES, PHASES, is_own_name
from memprof.trace.importers.allocations import Allocations
from memprof.trace.importers.called_modules import CalledModules
from memprof.trace.importers.columns import ALLOC, ANNOTATE, Blocks, Entries
from memprof.trace.importers.frames import MOST_MODULES
from memprof.trace.schema import CATEGORIES, NONE, ModuleCalls, Modules, Texts

#: Between what was noted of one tensor at different times.
_BETWEEN = "; "
#: Key of the first operator that saves a storage for backward, as an export writes it.
SAVED = "saved for backward by"
#: Key of what becomes metadata of a storage.
_TEXT = ""


def noted_of_lives(entries: Entries, blocks: Blocks, lives: Allocations) -> Texts:
    """Returns what the job noted of each life: metadata of its allocation, then its annotations, "" for nothing.

    Args:
        entries: The history, whose ``annotate`` entries have the address of what they are about.
        blocks: The end state.
        lives: Lives of its blocks.
    """
    if not any(entries.user_metadata):
        return np.full(len(lives), "", dtype=object)
    noted = ["" if entry == NONE else entries.user_metadata[entry] for entry in lives.alloc.tolist()]
    about: dict[int, list[int]] = {}
    for row in np.flatnonzero(entries.action == ANNOTATE).tolist():
        about.setdefault(int(entries.address[row]), []).append(row)
    if not about:
        return np.array(noted, dtype=object)
    first, last = lives.alloc.tolist(), np.where(lives.free == NONE, len(entries), lives.free).tolist()
    for life, block in enumerate(lives.block.tolist()):
        entry = next((one for one in (first[life], int(lives.free[life])) if one != NONE), NONE)
        address = int(blocks.address[block] if entry == NONE else entries.address[entry])
        rows = about.get(address, [])  # ascending
        found = [
            entries.user_metadata[row] for row in rows[bisect_right(rows, first[life]) : bisect_left(rows, last[life])]
        ]
        noted[life] = _BETWEEN.join(dict.fromkeys(text for text in (noted[life], *found) if text))
    return np.array(noted, dtype=object)


def noted_phases(metadata: Sequence[str]) -> Texts:
    """Returns the phase that each metadata names, as in ``{"phase": "forward"}``; "" where it names none.

    Names that memprof does not allow for phases count as none, and so do those beyond the first 64 distinct ones.
    """
    named = {text: _read(text).get("phase", "") for text in dict.fromkeys(metadata)}
    own = [name for name in dict.fromkeys(named.values()) if name not in PHASES and is_own_name(name)]
    allowed = {*PHASES, *own[:MOST_NAMES]}
    return np.array([named[text] if named[text] in allowed else "" for text in metadata], dtype=object)


@dataclass(frozen=True, eq=False)
class Exported:
    """What an export of memprof's notes of each entry of a history, "" for nothing; each of shape ``(entries,)``.

    Attributes:
        category: Category of what is allocated.
        name: Name of a parameter, buffer or state.
        operator: The operator that allocates.
        module: Name and class of the module that owns or allocates it, such as ``layers.0 (Block)``.
        metadata: Which operator saves it for backward first; of an earlier memprof's export, the whole text.
    """

    category: Texts
    name: Texts
    operator: Texts
    module: Texts
    metadata: Texts


def read_exported(entries: Entries) -> Exported | None:
    """Returns what an export of memprof's notes at each allocation; None for other histories."""
    notes = {text: _read(text) for text in dict.fromkeys(entries.user_metadata)}
    made = {entries.user_metadata[row] for row in np.flatnonzero(entries.action == ALLOC).tolist()}
    if not made or any(notes[text].get("category") not in CATEGORIES for text in made):
        return None
    notes.update({text: {**note, _TEXT: f"{SAVED} {note[SAVED]}"} for text, note in notes.items() if SAVED in note})
    of_entry = [notes[text] for text in entries.user_metadata]
    keys = ("category", "name", "operator", "module", _TEXT)
    return Exported(*(np.array([note.get(key, "") for note in of_entry], dtype=object) for key in keys))


def exported_modules(titles: Sequence[str]) -> CalledModules:
    """Returns the modules that rows name, such as ``layers.0 (Block)``, and those around them, without calls.

    Args:
        titles: Title of each row, "" outside modules, shape ``(rows,)``.
    """
    types: dict[str, str] = {}
    name_of: dict[str, str] = {}
    for title in filter(None, dict.fromkeys(titles)):
        name, _, kind = title.removesuffix(")").rpartition("(") if title.endswith(")") else (title, "", "")
        parts = name_of[title] = name.strip()
        for place in range(min(parts.count(".") + 1, MOST_MODULES) if parts else 0):
            types.setdefault(".".join(parts.split(".")[: place + 1]), "")
        types[parts] = kind
    numbers = {name: number for number, name in enumerate(sorted(types))}
    parents = [numbers.get(name.rpartition(".")[0], NONE) if name else NONE for name in numbers]
    modules = Modules.of(
        module_id=np.arange(len(numbers)),
        name=list(numbers),
        type=[types[name] for name in numbers],
        parent_id=parents,
        parameter_bytes=np.zeros(len(numbers)),
    )
    rows = [numbers[name_of[title]] if title else NONE for title in titles]
    return CalledModules(modules, ModuleCalls.empty(), np.array(rows, dtype=np.int64))


def _read(text: str) -> dict[str, str]:
    """Returns the texts that metadata holds by key; of an earlier memprof's export, its category."""
    if not text.startswith("{"):
        return {"category": text.partition(" ")[0], _TEXT: text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {key: one for key, one in found.items() if isinstance(one, str) and one.isprintable()}
