"""What is removed from the texts of a recording, found in its stacks and its command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memprof.analysis.export.plain_names import GONE, is_plain, name_of, plain_name, values_of
from memprof.analysis.report.sources import find_sources, is_library
from memprof.trace.schema import Stacks
from memprof.trace.secrets import mask_text
from memprof.trace.store import Trace

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


@dataclass(frozen=True)
class Rules:
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
        return json.dumps(change_texts(value, self.sentence), ensure_ascii=False)

    def frames(self, frames: str) -> str:
        """Replaces the files of a stack."""
        return "\n".join(self._frame(frame) for frame in frames.splitlines())

    def _frame(self, frame: str) -> str:
        file, rest = _split_frame(frame)
        # The function may be named after a person, or after an argument of the job.
        rest = self.values.sub(GONE, rest) if self.values is not None else rest
        return self.places.get(file, file) + self.names(rest)


def find_rules(trace: Trace, names: set[str]) -> Rules:
    """Returns the rules for one process of a recording."""
    stacks, manifest = trace.table(Stacks), trace.manifest
    files = {_split_frame(frame)[0] for frames in stacks.frames.tolist() for frame in frames.splitlines()}
    own = {
        line.file: line.place.removesuffix(f":{line.line}")
        for frames in find_sources(stacks).user_frames
        for line in frames
    }
    words = [part for word in (*manifest.command, manifest.target) for part in (word, _split_option(word)[1])]
    absolute = [path for path in (*files, *words) if _is_absolute(path)]
    people = {name for path in (*absolute, str(trace.path.absolute())) for name in people_in(path)} | names
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
    return Rules(
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


def _folders_above(paths: Iterable[str]) -> set[str]:
    """Returns the names of the folders that contain files: some name people or projects."""
    return {part for path in paths if not _INSTALLED.search(path) for part in re.split(r"[/\\\\]+", path)[:-1]}


def people_in(path: str) -> list[str]:
    """Returns the names of the home folders in a path."""
    return [name for found in _HOME.findall(path) for name in found if name]


def _any_of(words: set[str], after: str, before: str = "") -> re.Pattern[str] | None:
    """Returns a pattern that matches any of the words, the longest first."""
    if not words:
        return None
    longest = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(f"{after}(?:{'|'.join(map(re.escape, longest))}){before}", re.IGNORECASE if before else 0)


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Applies a change to every text inside JSON containers."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {str(name): change_texts(content, change) for name, content in value.items()}
    return [change_texts(item, change) for item in value] if isinstance(value, list | tuple) else value
