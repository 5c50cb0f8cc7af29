"""The command lines that the documentation shows: in README.md, in its pages, and in the help of every verb."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Languages of fenced blocks in which a shell's command may stand; one without a language counts as well.
_SHELLS = ("", "console", "bash", "sh", "yaml", "text")
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<marks>`{3,}|~{3,})(?P<language>[\w-]*)")
_PROMPT = re.compile(r"^(\$ |- run: )")
_VARIABLE = re.compile(r"^[A-Z_]+=\S*$")
#: What stands for something in a synopsis: optional parts, repetitions, and names in capitals.
_SYNOPSIS = re.compile(r"\[|\.\.\.|…|(^|[ |=])[A-Z]{3,}([ |.]|$)")
_INLINE = re.compile(r"`(memprof [^`\n]+)`")


@dataclass(frozen=True)
class CodeLine:
    """A line of code in a page.

    Attributes:
        number: Its number in the page, 1 first.
        language: What stands behind the fence; "" for none, and for indented code.
        text: The line without the indentation of its block.
    """

    number: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command line of memprof's.

    Attributes:
        place: Page and line, such as ``docs/fit.md:6``.
        text: The line as it is written, without prompt and comment.
        words: The words behind ``memprof``.
        before: The words in front of it, a launcher such as ``srun``.
        variables: Variables of the environment set in front of it.
    """

    place: str
    text: str
    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def verb(self) -> str:
        """The verb; "" where an option such as --help stands in its place."""
        return next((word for word in self.words[:1] if not word.startswith("-")), "")

    @property
    def is_synopsis(self) -> bool:
        """Whether it says how commands are formed, and is none itself."""
        return _SYNOPSIS.search(re.sub(r"'[^']*'", "", self.text)) is not None


def code_lines(text: str) -> Iterator[CodeLine]:
    """Finds the lines of fenced and of indented blocks of a Markdown page."""
    language, marks, indent = "", "", 0
    is_block, blank_before = False, True
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if marks:
            if fence and fence["marks"].startswith(marks) and not fence["language"]:
                marks = ""
            else:
                yield CodeLine(number, language, line[indent:] if line[:indent].isspace() else line)
        elif fence:
            language, marks, indent = fence["language"], fence["marks"], len(fence["indent"])
        elif line.startswith("    ") and (blank_before or is_block):
            is_block = True
            yield CodeLine(number, "", line[4:])
        else:
            is_block = False
        blank_before = not line.strip()


def commands_of(text: str, name: str) -> list[Command]:
    """Finds memprof's command lines in a page.

    Args:
        text: The page, in Markdown.
        name: What it is called, for ``place``.

    A line that ends in a backslash goes on; of commands joined by ``&&`` or ``|``, each of memprof's is one.
    """
    found: list[Command] = []
    begun, start = "", 0
    for line in code_lines(text):
        if line.language not in _SHELLS:
            continue
        begun = begun + line.text.strip() if begun else line.text.strip()
        start = start or line.number
        if begun.endswith("\\"):
            begun = begun.removesuffix("\\")
            continue
        found += _commands_in_line(_PROMPT.sub("", begun), f"{name}:{start}")
        begun, start = "", 0
    return found


def _commands_in_line(line: str, place: str) -> Iterator[Command]:
    for part in re.split(r" (?:&&|\|) (?=[a-z])", line):
        if not re.search(r"(^|\s)memprof\s", part):
            continue
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # a sentence with an apostrophe: the output of a command, not one
            continue
        if "memprof" not in words:
            continue
        at = words.index("memprof")
        variables = dict(word.split("=", 1) for word in words[:at] if _VARIABLE.match(word))
        before = [word for word in words[:at] if not _VARIABLE.match(word)]
        if before and before[0] not in ("mpirun", "srun"):
            continue
        if ">" in words:
            words = words[: words.index(">")]
        text = re.sub(r"\s+#.*$", "", part).strip()
        yield Command(place, text, tuple(words[at + 1 :]), tuple(before), variables)


def inline_commands(text: str, name: str) -> list[Command]:
    """Finds commands of memprof's in running text, between backticks; most of them are parts of one."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for shown in _INLINE.findall(line):
            words = tuple(re.sub(r"[\[\]'\"]", " ", shown.replace(r"\|", " ")).split()[1:])
            found.append(Command(f"{name}:{number}", shown, words))
    return found


def pages() -> list[Path]:
    """Returns README.md, AGENTS.md, SKILL.md and the pages of docs/."""
    return [*(ROOT / name for name in ("README.md", "AGENTS.md", "SKILL.md")), *sorted((ROOT / "docs").glob("*.md"))]


def page_commands() -> list[Command]:
    """Returns every command line of README.md and the pages."""
    return [found for page in pages() for found in commands_of(page.read_text(encoding="utf-8"), name_of(page))]


def name_of(page: Path) -> str:
    """Returns a file's name in the repository."""
    return page.relative_to(ROOT).as_posix()
