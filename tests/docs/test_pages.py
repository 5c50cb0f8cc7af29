"""The pages: links are valid, Python in them runs or compiles, generated ones match the code."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import memprof
from docs.building import reference, verbs
from docs.building.commands import ROOT, name_of, pages
from docs.building.workshop import run
from memprof.cli.main import VERBS
from memprof.machines.catalogue import accelerators
from memprof.planners.base import planner_types
from memprof.policies.registry import policy_types

#: Pages that are only there once the site is built.
BUILT = {"changelog.md", "contributing.md", "decisions.md", "verbs/index.md"}

_PYTHON = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    place: str
    code: str

    def runs_alone(self) -> bool:
        """Whether it imports or makes every name it uses, and reads no file of the reader's."""
        tree = ast.parse(self.code)
        used, made = set(), set(dir(builtins))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                made |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        return (
            bool(used)
            and used <= made
            and not any(re.search(r"^(run\.memprof|plan\.toml|\w+://.*)$", text) for text in texts)
        )


def _snippets() -> list[Snippet]:
    found = []
    for page in [*pages(), ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for match in _PYTHON.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Snippet(f"{name_of(page)}:{line}", textwrap.dedent(match["code"])))
    return found


SNIPPETS = _snippets()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.place)
def test_python_in_pages_is_python(snippet: Snippet) -> None:
    """Every block of Python in a page can be compiled, and what it imports of memprof's is there."""
    tree = ast.parse(snippet.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("memprof", "memprof_dashboard"):
            module = __import__(node.module or "", fromlist=[alias.name for alias in node.names])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{snippet.place}: {node.module} has no {alias.name}"


@pytest.mark.parametrize(
    "snippet",
    [
        # Those of python.md search for plans, which takes seconds.
        pytest.param(snippet, id=snippet.place, marks=[pytest.mark.slow] if "python.md" in snippet.place else [])
        for snippet in SNIPPETS
        if snippet.runs_alone()
    ],
)
def test_python_that_stands_alone_runs(snippet: Snippet, tmp_path: Path) -> None:
    """A block that needs nothing but the samples is run, in a process of its own; what it asserts is true."""
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    (tmp_path / "snippet.py").write_text(snippet.code, encoding="utf-8")
    done = run(["python", "snippet.py"], tmp_path)
    assert done.status == 0, f"{snippet.place}\n{done.errors}"


def test_the_page_of_python_has_every_public_name() -> None:
    """Each name of ``memprof.__all__`` is in the table of docs/python.md, and the table names no other."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `memprof\.(\w+)", page, re.MULTILINE)) == set(memprof.__all__)


def test_no_page_has_a_mark_where_text_is_missing() -> None:
    """Such as @@FIGURES@@, which is written until a figure is measured."""
    assert not [name_of(page) for page in pages() if re.search(r"@@\w+@@", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "DECISIONS.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is to a file of the repository or a generated page, every anchor to a heading there."""
    wrong = []
    for target in _LINK.findall(_without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if name and path.parent == ROOT / "docs" and path.name in BUILT:
            continue
        if name.startswith("verbs/") and (name in BUILT or Path(name).stem in VERBS):
            continue
        if not path.exists():
            wrong.append(f"{name_of(page)}: {target} is no file")
        elif anchor and path.suffix == ".md" and anchor not in set(_anchors(path)):
            wrong.append(f"{name_of(page)}: {target} is no heading")
    assert not wrong, "\n".join(wrong)


def _without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^ *```$", "", re.sub(r"``.+?``|`[^`\n]+`", "code", text), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> Iterator[str]:
    """The anchors of a page's headings, where those of the site and of a repository's pages are the same."""
    for heading in _HEADING.findall(page.read_text(encoding="utf-8")):
        plain = re.sub(r"[`*\\]", "", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading))
        anchor = re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())
        if "--" not in anchor:  # which the site makes one hyphen
            yield anchor


def test_the_skill_says_what_it_is_and_when_to_use_it() -> None:
    """Its header has a name and a description of at most 1,024 characters, by which an assistant chooses it."""
    head, text = re.fullmatch(r"---\n(.*?)\n---\n(.*)", (ROOT / "SKILL.md").read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    described = re.search(r"^description: >-\n((?:  .*\n)+)", head, re.MULTILINE)
    assert "name: memprof\n" in head
    assert described is not None
    assert 200 < len(" ".join(described[1].split())) <= 1024
    assert len(text.splitlines()) <= 100


def test_the_readme_fits_two_screens() -> None:
    """README.md is at most a hundred lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_page_has_its_options(verb: str) -> None:
    """The page of a verb names every option that its help does, with the help's own words."""
    page = verbs.verb_page(verb, {path.name for path in pages()})
    for name in verbs.option_names(verb):
        assert name in page
    for example in verbs.examples_of(verb):
        assert example in page


def test_exit_codes_are_those_of_the_errors() -> None:
    """The page of exit codes has those of every error, and of success."""
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", "\n".join(reference.exit_codes()), re.MULTILINE))
    assert set(rows) == {"0", "1", "2", "3", "4", "5", "125", "126", "127", "130"}
    assert rows["4"] == "A limit the user set is exceeded. (`GateFailedError`)"


def test_machines_policies_and_planners_are_all_there() -> None:
    """Generated tables leave nothing out."""
    machines, costs, planners, sources = (
        "\n".join(lines)
        for lines in (
            reference.machines(),
            [*reference.costs(), *reference.costs_not_told()],
            reference.planners(),
            reference.sources(),
        )
    )
    assert all(f"| {one.name} |" in machines and f"- **{one.name}**: {one.source}" in sources for one in accelerators())
    assert all(f" [{kind.name}](policies.md#{kind.name}) " in costs for kind in policy_types())
    assert all(f"| `{kind.name}` |" in planners and kind.source in planners for kind in planner_types())


def test_costs_are_those_of_predict() -> None:
    """The table of costs has the sample's peak with its layers checkpointed, 39,519,308 bytes of 93,237,072."""
    (row,) = [line for line in reference.costs() if line.startswith("| [checkpoint]")]
    assert "| `--checkpoint 'layers.*'` | 37.69 MiB | -57.6% |" in row


def test_every_generated_part_has_its_place() -> None:
    """Each part is asked for by a page, and no page asks for another."""
    asked = re.findall(r"<!-- generated: ([\w ]+),", "\n".join(page.read_text(encoding="utf-8") for page in pages()))
    assert sorted(asked) == sorted(reference.PARTS)
