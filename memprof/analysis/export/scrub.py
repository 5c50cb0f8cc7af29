"""Removes identifying data and the job's arguments from a recording, so that it can be shared with strangers.

Of the command line only the program and the option names stay, without values. Files are shown below the job's own
folder or below ``site-packages``, reduced to the common words of their names; names of people, hosts and nodes,
addresses, and likely secrets become ``…``. Modules, parameters, operators and numbers stay.
"""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memprof.analysis.export.plain_names import GONE, name_of, plain_name, scrub_command
from memprof.analysis.export.scrub_rules import Rules, change_texts, find_rules, people_in
from memprof.phases import PHASES
from memprof.trace.files.coded import Coded
from memprof.trace.files.container import columns_of
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Annotations, Optimizers, OutOfMemory, ReadValues, Stacks, Table
from memprof.trace.store import Trace

T = TypeVar("T", bound=Table)

_SAYS_SO = "Arguments, paths, and names of people and hosts were removed from this recording."

#: Words in host names that do not identify a host.
_NETS = {"internal", "local", "localhost", "localdomain", "cluster", "compute", "node", "corp", "cloud", "login"}


def scrubbed(trace: Trace, names: Iterable[str] = ()) -> Trace:
    """Returns a recording without paths, home folders, names of people and hosts, addresses and secrets.

    Tables are read and scrubbed lazily. Files keep their place below the folder that all the job's own files share, so
    that every report on the scrubbed recording names the same lines.

    Args:
        trace: The recording; it is not modified.
        names: More words to remove, such as the name of this machine.
    """
    manifests = [trace.manifest_of(number) for number in trace.ranks]
    nodes = list(dict.fromkeys(one.node for one in manifests if one.node))
    clocks = list(dict.fromkeys(one.clock for one in manifests if one.clock))
    named = {*names, *(part for node in nodes for part in _host_parts(node))}
    ranks = {number: _ScrubbedRank(trace.rank_trace(number), named, nodes, clocks) for number in trace.ranks}
    path = ranks[trace.rank].rules.text(plain_name(trace.path.name)) or "recording"
    return Trace(Path(path), ranks, trace.rank)


def own_names() -> list[str]:
    """Returns the names of this machine and its user: most recordings are read where they were made."""
    names = [*_host_parts(platform.node()), *people_in(f"{Path.home()}/")]
    try:
        names.append(getpass.getuser())
    except (KeyError, OSError):  # a user without a name, as in some containers
        return names
    return names


class _ScrubbedRank:
    """One process of a recording, scrubbed as it is read."""

    def __init__(self, trace: Trace, names: set[str], nodes: list[str], clocks: list[str]) -> None:
        self._trace = trace
        self.rules = find_rules(trace, names)
        manifest = trace.manifest
        self.manifest = replace(
            _scrub_manifest(manifest, self.rules),
            # Which ranks shared a machine stays visible.
            node=_numbered("node", manifest.node, nodes),
            clock=_numbered("clock", manifest.clock, clocks),
        )

    def read(self, kind: type[T], /) -> T:
        """Reads one table; values of the job are left out."""
        if kind is ReadValues:
            return kind.empty()
        table = self._trace.table(kind)
        changed: dict[str, Any] = {}
        for column in _texts_of(kind):
            coded = _recoded(Coded.of(getattr(table, column)), self._change(kind, column))
            changed[column] = coded.distinct[coded.codes] if len(coded) else getattr(table, column)
        return table.replace(**changed)

    def read_columns(self, kind: type[Table], names: Sequence[str], /) -> dict[str, Any]:
        """Reads some columns of one table."""
        if kind is ReadValues:
            return columns_of(kind.empty(), names)
        columns = self._trace.columns(kind, *names)
        for name in set(names) & set(_texts_of(kind)):
            columns[name] = _recoded(columns[name], self._change(kind, name))
        return columns

    def _change(self, kind: type[Table], column: str) -> Callable[[str], str]:
        if kind is Stacks:
            return self.rules.frames if column == "frames" else self.rules.names
        if kind is Annotations or column in ("user_metadata", "metadata"):  # written by the job
            return self.rules.text
        if kind is OutOfMemory and column == "message":
            return self.rules.sentence
        if kind is Optimizers:
            return self.rules.settings if column == "settings" else self.rules.class_name
        if next(one for one in kind.columns() if one.name == column).is_open:
            return lambda text: text if text in PHASES else self.rules.names(text)
        return self.rules.names


def _scrub_manifest(manifest: Manifest, rules: Rules) -> Manifest:
    machine, backend, capture = manifest.machine, manifest.backend, manifest.capture
    settings = machine.allocator_settings
    version = re.match(r"\w+ [\d.]*\d", machine.os)  # the rest may be a custom kernel name
    return replace(
        manifest,
        command=scrub_command(manifest.command, manifest.target, rules.names),
        target=rules.file(name_of(manifest.target)),
        notes=(*(rules.sentence(note) for note in manifest.notes), _SAYS_SO),
        categories=(),  # patterns of names that are replaced
        plan=None if manifest.plan is None else change_texts(manifest.plan, rules.text),
        later=replace(manifest.later, line=rules.file(manifest.later.line)),
        capture=replace(capture, ends_at=rules.names(capture.ends_at), reason=rules.sentence(capture.reason)),
        backend=replace(
            backend,
            sees=tuple(rules.text(text) for text in backend.sees),
            blind_spots=tuple(rules.text(text) for text in backend.blind_spots),
        ),
        machine=replace(
            machine,
            os=version[0] if version else "",
            allocator_settings=settings if re.fullmatch(r"[\w:.,\[\]>-]*", settings) else GONE,
            speed=replace(machine.speed, how=rules.text(machine.speed.how)),
        ),
    )


def _texts_of(kind: type[Table]) -> list[str]:
    return [column.name for column in kind.columns() if column.kind == "text" and (column.is_open or not column.values)]


def _recoded(column: Coded, change: Callable[[str], str]) -> Coded:
    """Changes each distinct text of a column; texts that become equal share a code."""
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(change(text), len(known)) for text in column.distinct.tolist()], dtype=np.int32)
    distinct = np.empty(len(known), dtype=object)
    distinct[:] = list(known)
    return Coded(codes[column.codes] if len(codes) else column.codes, distinct)


def _numbered(kind: str, name: str, known: list[str]) -> str:
    """Returns the label of a node or a clock; a single one needs no number."""
    if not name:
        return ""
    return f"{kind} {known.index(name) + 1}" if len(known) > 1 else GONE


def _host_parts(host: str) -> list[str]:
    """Returns a host's name, whole and in its identifying parts."""
    labels = [label for label in host.split(".") if len(label) > 3 and label.lower() not in _NETS]
    domain = host.partition(".")[2]
    return [name for name in (host, *labels, *([domain] if "." in domain else [])) if name]
