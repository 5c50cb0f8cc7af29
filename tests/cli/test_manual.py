"""The manual pages: one for memprof and one for each verb, in the wheel, and what `man` prints of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memprof.cli.main import VERBS, memprof
from memprof.cli.manual import manual_pages

GROFF = pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return manual_pages()


def printed(page: str) -> str:
    """Returns a page as a terminal shows it; a complaint of groff's is an error."""
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-c", "-P-b", "-P-u", "-rLL=200n"],
        input=page,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_verb_has_a_page(pages: dict[str, str]) -> None:
    """And memprof's own names them all."""
    assert set(pages) == {"memprof.1", *(f"memprof-{verb}.1" for verb in VERBS)}
    for verb, summary in VERBS.items():
        assert "\\fBmemprof\\-" + verb.replace("-", "\\-") + "(1)\\fR" in pages["memprof.1"]
        assert summary.partition(" ")[0] in pages[f"memprof-{verb}.1"]


def test_every_option_is_in_it(pages: dict[str, str]) -> None:
    """As it is typed: dashes are dashes."""
    context = click.Context(memprof, **memprof.context_settings)
    for verb in VERBS:
        command = memprof.get_command(context, verb)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert param.opts[-1].replace("-", "\\-") in pages[f"memprof-{verb}.1"], (verb, param.opts)


def test_groups_of_options_have_headings(pages: dict[str, str]) -> None:
    """Where the help has more than one group; elsewhere the options follow directly."""
    assert "\n.SS Plan and policies\n" in pages["memprof-record.1"]
    assert ".SS" not in pages["memprof-verify.1"]


@GROFF
def test_man_prints_them_without_a_complaint(pages: dict[str, str]) -> None:
    """Quotes, dots and patterns come out as they are typed."""
    for page in pages.values():
        assert "NAME" in printed(page)
    text = printed(pages["memprof-record.1"])
    assert "memprof record --checkpoint 'layers.*' train.py" in text
    assert "MEMPROF_OUTPUT" in text
    assert "EXIT STATUS" in printed(pages["memprof-report.1"])


def test_making_them_imports_nothing_but_click(tmp_path: Path) -> None:
    """A wheel is built where nothing else is installed; and every verb's help is there at once."""
    script = (
        "import sys; before = set(sys.modules); from pathlib import Path; "
        "from memprof.cli.manual import write_pages; write_pages(Path(sys.argv[1])); "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["click", "memprof", "memprof_dashboard"], done.stderr
    assert {path.name for path in tmp_path.iterdir()} == set(manual_pages())
