"""Removes identifying data and the job's arguments from a recording, so that it can be shared with strangers.

Of the command line only the program and the option names stay, without values. Files are shown below the job's own
folder or below ``site-packages``, reduced to the common words of their names; names of people, hosts and nodes,
addresses, and likely secrets become ``…``. Modules, parameters, operators and numbers stay.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memprof.analysis.export.plain_names import GONE, is_plain, name_of, plain_name
from memprof.analysis.export.scrub_command import scrub_command, values_of
from memprof.analysis.report.sources import find_sources, is_library
from memprof.phases import PHASES
from memprof.trace.files.columns import Coded
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Optimizers, OutOfMemory, Stacks, Table
from memprof.trace.secrets.masking import mask_text
from memprof.trace.store import Trace

T = TypeVar("T", bound=Table)

_SAYS_SO = "Arguments, paths, and names of people and hosts were removed from this recording."

#: The part of a library's path that is identical on every machine; the last occurrence in the path counts.
_LIBRARY_PART = re.compile(
    r"^.*[/\\]((?:(?:site|dist)-packages|lib(?:64)?[/\\]python3\.\d+t?|python3?\d*[/\\]lib"
    r"|memprof[/\\](?=recorder|launch|policies)|torchinductor_[^/\\]*)[/\\]*[/\\].*)$",
    re.IGNORECASE,
)
_INDUCTOR = re.compile(r"^torchinductor_[^/\\]*", re.IGNORECASE)  # its folder is named after the user
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]", re.IGNORECASE)
_EMAIL = re.compile(r"([\w.+-]+)@[A-Za-z]")
_HOME = re.compile(r"[/\\](?:home|Users)[/\\]+([^/\\:]+)|[/\\]torchinductor_([^/\\]+)", re.IGNORECASE)
#: Accounts that are not a person's name, and that would be missed in a text.
_NOBODY = {"root", "user", "users", "ubuntu", "runner", "admin", "shared", "public", "app", "train", "model", "torch"}

_NOT_IN_PATHS = r"\s\"'`<>|;,()\[\]{}="
_PATHS = re.compile(
    rf"[A-Za-z][\w+.-]*://[^{_NOT_IN_PATHS}]*"  # file:///home/somebody, https://host/…
    rf"|(?<![\w…])[A-Za-z]:[\\/][^{_NOT_IN_PATHS}:]*"  # C:\Users\somebody
    rf"|\\\\[^{_NOT_IN_PATHS}:]+"  # \\host\share
    rf"|(?<![\w…~.*/\\)\]-])/[^{_NOT_IN_PATHS}:/][^{_NOT_IN_PATHS}:]*"  # /home/somebody
    rf"|(?<![\w…])~[\w.-]*/[^{_NOT_IN_PATHS}:]*"  # ~somebody/
)
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9_]{2,}=\S")  # environment variable
_PRIVATE = re.compile(
    rf"{_VARIABLE.pattern}+"
    r"|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{8,}"  # keys by their prefix
    r"|\b[0-9a-fA-F]{32,}\b"
    r"|[\w.+-]+@[\w-]+(?:\.[\w-]+)*(?::\d+)?"  # somebody@host
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # an address
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
)
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
    names = [*_host_parts(platform.node()), *_people(f"{Path.home()}/")]
    try:
        names.append(getpass.getuser())
    except (KeyError, OSError):  # a user without a name, as in some containers
        return names
    return names


class _ScrubbedRank:
    """One process of a recording, scrubbed as it is read."""

    def __init__(self, trace: Trace, names: set[str], nodes: list[str], clocks: list[str]) -> None:
        self._trace = trace
        self.rules = _find_rules(trace, names)
        manifest = trace.manifest
        self.manifest = replace(
            _scrub_manifest(manifest, self.rules),
            # Which ranks shared a machine stays visible.
            node=_numbered("node", manifest.node, nodes),
            clock=_numbered("clock", manifest.clock, clocks),
        )

    def read(self, kind: type[T], /) -> T:
        """Reads one table."""
        table = self._trace.table(kind)
        changed: dict[str, Any] = {}
        for column in _texts_of(kind):
            coded = _recoded(Coded.of(getattr(table, column)), self._change(kind, column))
            changed[column] = coded.distinct[coded.codes] if len(coded) else getattr(table, column)
        return table.replace(**changed)

    def read_columns(self, kind: type[Table], names: Sequence[str], /) -> dict[str, Any]:
        """Reads some columns of one table."""
        columns = self._trace.columns(kind, *names)
        for name in set(names) & set(_texts_of(kind)):
            columns[name] = _recoded(columns[name], self._change(kind, name))
        return columns

    def _change(self, kind: type[Table], column: str) -> Callable[[str], str]:
        if kind is Stacks:
            return self.rules.frames
        if kind is OutOfMemory and column == "message":
            return self.rules.sentence
        if kind is Optimizers:
            return self.rules.settings if column == "settings" else self.rules.class_name
        if next(one for one in kind.columns() if one.name == column).is_open:
            return lambda text: text if text in PHASES else self.rules.names(text)
        return self.rules.names


@dataclass(frozen=True)
class _Rules:
    """What to remove from the texts of one process.

    Attributes:
        places: Replacement for each file of its stacks.
        known: Matches these files, and the folders above them.
        people: Matches names of people and hosts; None where there are none.
        values: Matches the job's arguments, and the folders it is in; None where there are none.
    """

    places: dict[str, str]
    known: re.Pattern[str] | None
    people: re.Pattern[str] | None
    values: re.Pattern[str] | None = None

    def paths(self, text: str) -> str:
        """Removes paths from a text."""
        if "/" not in text and "\\" not in text:
            return text
        if self.known is not None:
            text = self.known.sub(lambda match: self.places.get(match[0], ""), text)
        return _PATHS.sub(lambda match: _last_part(match[0]), text)

    def text(self, text: str) -> str:
        """Removes everything identifying from a text written by people."""
        text = _PRIVATE.sub(GONE, mask_text(self.paths(text)))
        return self.people.sub(GONE, text) if self.people is not None else text

    def sentence(self, text: str) -> str:
        """Removes everything identifying from a text the job may have written, including its argument values."""
        text = self.text(text)
        return self.values.sub(GONE, text) if self.values is not None else text

    def names(self, text: str) -> str:
        """Removes paths and people from the name of a module, a parameter or an operator."""
        text = self.paths(text)
        return self.people.sub(GONE, text) if self.people is not None else text

    def file(self, name: str) -> str:
        """Removes identifying words from the name of a file or module."""
        return plain_name(self.names(name))

    def class_name(self, name: str) -> str:
        """Removes the module from the name of a class defined by the job."""
        module, dot, own = name.rpartition(".")
        return self.names(name if module.partition(".")[0] == "torch" else f"{self.file(module)}{dot}{own}")

    def settings(self, text: str) -> str:
        """Removes texts from JSON settings; numbers and booleans stay."""
        try:
            value = json.loads(text)
        except ValueError:
            return self.sentence(text)
        return json.dumps(_inside(value, self.sentence), ensure_ascii=False)

    def frames(self, frames: str) -> str:
        """Replaces the files of a stack."""
        return "\n".join(self._frame(frame) for frame in frames.splitlines())

    def _frame(self, frame: str) -> str:
        file, rest = _split_frame(frame)
        # The function may be named after a person, or after an argument of the job.
        rest = self.values.sub(GONE, rest) if self.values is not None else rest
        return self.places.get(file, file) + self.names(rest)


def _find_rules(trace: Trace, names: set[str]) -> _Rules:
    stacks, manifest = trace.table(Stacks), trace.manifest
    files = {_split_frame(frame)[0] for frames in stacks.frames.tolist() for frame in frames.splitlines()}
    own = {
        line.file: line.place.removesuffix(f":{line.line}")
        for frames in find_sources(stacks).user_frames
        for line in frames
    }
    words = [part for word in (*manifest.command, manifest.target) for part in (word, _split_option(word)[1])]
    absolute = [path for path in (*files, *words) if _is_absolute(path)]
    people = {name for path in (*absolute, str(trace.path.absolute())) for name in _people(path)} | names
    given = list(values_of(manifest.command, manifest.target))
    people |= {name for word in words for name in _EMAIL.findall(word)}
    people = {name for name in people if len(name) > 2 and name.lower() not in _NOBODY}
    person = _any_of(people, after=r"(?<![A-Za-z0-9])", before=r"(?![A-Za-z0-9])")
    places: dict[str, str] = {}
    taken: set[str] = set()
    for file in sorted(files):
        places[file] = _place(file, own.get(file, file), person, taken)
        taken.add(places[file])
    folders = _own_folders(own)
    return _Rules(
        places=places,
        known=_any_of({file for file in files if _is_absolute(file)} | folders, after=r"(?<![\w.~-])"),
        people=person,
        values=_any_of(
            {word for word in (*given, *_folders_above(absolute)) if len(word) > 3 and not is_plain(word)},
            after=r"(?<![A-Za-z0-9])",
            before=r"(?![A-Za-z0-9])",
        ),
    )


def _own_folders(places: dict[str, str]) -> set[str]:
    """Returns the folders that the job's own files are shown relative to, each with its trailing slash."""
    return {
        file[: -len(place)]
        for file, place in places.items()
        if file.startswith("/") and file.endswith(f"/{place}") and len(file) > len(place) + 1
    }


def _place(file: str, place: str, people: re.Pattern[str] | None, taken: set[str]) -> str:
    """Returns the replacement for a file: a unique place that reveals nothing about the machine."""
    if not _is_absolute(file):
        shown = file if file.startswith("<") else plain_name(file)
    elif is_library(file) or _INSTALLED.search(file):
        found = _LIBRARY_PART.match(file)
        part = found[1] if found else name_of(file)
        shown = f"{GONE}/{_INDUCTOR.sub('torchinductor_', part)}"
    else:
        shown = plain_name(name_of(place) if _is_absolute(place) else place)
    shown = people.sub(GONE, shown) if people is not None else shown
    unique, count = shown, 1
    while unique in taken:
        count += 1
        unique = f"{shown} ({count})"
    return unique


def _scrub_manifest(manifest: Manifest, rules: _Rules) -> Manifest:
    machine, backend, capture = manifest.machine, manifest.backend, manifest.capture
    settings = machine.allocator_settings
    version = re.match(r"\w+ [\d.]*\d", machine.os)  # the rest may be a custom kernel name
    return replace(
        manifest,
        command=scrub_command(manifest.command, manifest.target, rules.names),
        target=rules.file(name_of(manifest.target)),
        notes=(*(rules.sentence(note) for note in manifest.notes), _SAYS_SO),
        plan=None if manifest.plan is None else _inside(manifest.plan, rules.text),
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


def _inside(value: Any, change: Callable[[str], str]) -> Any:
    """Applies a change to every text inside JSON containers."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {str(name): _inside(content, change) for name, content in value.items()}
    return [_inside(item, change) for item in value] if isinstance(value, list | tuple) else value


def _texts_of(kind: type[Table]) -> list[str]:
    return [column.name for column in kind.columns() if column.kind == "text" and (column.is_open or not column.values)]


def _recoded(column: Coded, change: Callable[[str], str]) -> Coded:
    """Changes each distinct text of a column; texts that become equal share a code."""
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(change(text), len(known)) for text in column.distinct.tolist()], dtype=np.int32)
    distinct = np.empty(len(known), dtype=object)
    distinct[:] = list(known)
    return Coded(codes[column.codes] if len(codes) else column.codes, distinct)


def _split_frame(frame: str) -> tuple[str, str]:
    """Splits ``file:line:function`` into the file and the rest with its colon; a file name may contain colons."""
    parts = frame.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit():
        return parts[0], f":{parts[1]}:{parts[2]}"
    return frame, ""


def _split_option(word: str) -> tuple[str, str]:
    """Splits ``--data=/mnt/data`` or ``-I/usr/include`` before the path."""
    found = re.match(r"^(--?[\w.-]+=|[\w.]+=|-\w(?=[/~]))(.*)$", word, re.DOTALL)
    return (found[1], found[2]) if found else ("", word)


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~", "\\\\")) or re.match(r"[A-Za-z]:[\\/]|file:", path) is not None


def _last_part(path: str) -> str:
    """Returns the file name of a path, without folders or network address."""
    name = name_of(path)
    is_file = "://" not in path and re.fullmatch(r"[^.].*\.[A-Za-z]\w{0,8}", name) is not None
    return f"{GONE}/{name}" if is_file else GONE


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


def _folders_above(paths: Iterable[str]) -> set[str]:
    """Returns the names of the folders that contain files: some name people or projects."""
    return {part for path in paths if not _INSTALLED.search(path) for part in re.split(r"[/\\\\]+", path)[:-1]}


def _people(path: str) -> list[str]:
    return [name for found in _HOME.findall(path) for name in found if name]


def _any_of(words: set[str], after: str, before: str = "") -> re.Pattern[str] | None:
    """Returns a pattern that matches any of the words, the longest first."""
    if not words:
        return None
    longest = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(f"{after}(?:{'|'.join(map(re.escape, longest))}){before}", re.IGNORECASE if before else 0)
