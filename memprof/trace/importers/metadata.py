"""What a snapshot notes: metadata of allocations, annotations of tensors, phases, and all that an export writes."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

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
METADATA = ""
#: What memprof 1.0 wrote of what an operator allocates: ``activation aten.relu.default in layers.0``.
_MARK_1_0 = re.compile(r"\w+ aten\.\w+\.\w+(?: in \S+)?")


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


def read_exported(entries: Entries) -> Mapping[str, Texts] | None:
    """Returns what an export of memprof's notes of each entry, ``""`` for nothing; None for other histories.

    Returns:
        By key, shape ``(entries,)`` each: ``category``, ``name``, ``operator``, ``module`` with its class, such as
        ``layers.0 (Block)``, and METADATA: what saves it for backward, or all that an earlier memprof wrote.
    """
    notes = {text: _read(text) for text in dict.fromkeys(entries.user_metadata)}
    made = {entries.user_metadata[row] for row in np.flatnonzero(entries.action == ALLOC).tolist()}
    if not made or any(notes[text].get("category") not in CATEGORIES for text in made):
        return None
    plain = [text for text in made if not text.startswith("{")]
    if plain and not any(map(_MARK_1_0.fullmatch, plain)):
        return None  # another's words, such as "input batch"
    for note in notes.values():
        note.update({METADATA: f"{SAVED} {note[SAVED]}"} if SAVED in note else {})
    of_entry = [notes[text] for text in entries.user_metadata]
    keys = ("category", "name", "operator", "module", METADATA)
    return {key: np.array([note.get(key, "") for note in of_entry], dtype=object) for key in keys}


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
        return {"category": text.partition(" ")[0], METADATA: text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {key: one for key, one in found.items() if isinstance(one, str) and one.isprintable()}
