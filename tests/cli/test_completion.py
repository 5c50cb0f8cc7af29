"""Shell completion and the manual pages: what is offered, and what the wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memprof.cli.main import VERBS, main, memprof
from memprof.cli.manual import manual_pages
from memprof.machines.card import find_card
from memprof.machines.catalogue import accelerators, find_machine
from memprof.planners.base import planner_types
from memprof.policies.registry import policy_types
from memprof.trace.schema import TABLES

BIN = Path(sys.executable).parent


def offered(folder: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str = "zsh") -> list[tuple[str, str]]:  # fmt: skip  # noqa: E501
    """Asks as a shell's script does, and returns type and value of each offer. ``words`` ends where the cursor is."""
    monkeypatch.chdir(folder)
    typed = words.split(" ")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", "\n".join(typed))
        monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    else:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    monkeypatch.setenv("_MEMPROF_COMPLETE", f"{shell}_complete")
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([]))
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    if shell == "bash":
        return [(kind, value) for kind, _, value in (line.partition(",") for line in lines)]
    return list(zip(lines[0::3], lines[1::3], strict=len(lines) > 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run.memprof", "other run.memprof", "notes.txt", ".hidden.memprof", "train.py"):
        (tmp_path / name).touch()
    for name in ("runs", "run.memprof.spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs" / "a.memprof").touch()
    return tmp_path


def values(found: list[tuple[str, str]]) -> list[str]:
    return [value for kind, value in found if kind == "plain"]


def test_recordings_are_offered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a recording is named: .memprof files and spools, and folders to look into; no other file."""
    found = offered(folder, "memprof report ", monkeypatch, capsys)
    assert values(found) == ["other run.memprof", "run.memprof", "run.memprof.spool"]
    assert ("dir", "") in found
    for name in ("memory.json", "gpu.pickle"):
        (folder / "runs" / name).touch()
    assert values(offered(folder, "memprof report runs/", monkeypatch, capsys)) == ["runs/a.memprof"]
    compared = ["runs/a.memprof", "runs/gpu.pickle", "runs/memory.json"]
    assert values(offered(folder, "memprof diff run.memprof runs/", monkeypatch, capsys)) == compared
    assert values(offered(folder, "memprof report nowhere/", monkeypatch, capsys)) == []
    bash = offered(folder, "memprof report ru", monkeypatch, capsys, "bash")
    assert bash == [("plain", "run.memprof"), ("plain", "run.memprof.spool"), ("plain", "runs")]


def test_the_job_may_be_any_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the job begins, the shell offers its own files."""
    assert [kind for kind, _ in offered(folder, "memprof record tr", monkeypatch, capsys)] == ["file"]


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("memprof re", ["record", "report"]),
        ("memprof export run.memprof --to p", ["perfetto", "parquet"]),
        ("memprof diff run.memprof --device a100", ["a100-40gb"]),
        ("memprof record --device rtx-40", ["rtx-4080", "rtx-4090"]),
        ("memprof record --precision ", ["bf16", "fp16", "pure-bf16"]),
        ("memprof record --shard z", ["zero1", "zero2"]),
        ("memprof predict run.memprof --optimizer in-backward,f", ["in-backward,foreach", "in-backward,fused"]),
        ("memprof suggest run.memprof --planner c", ["chain", "checkmate"]),
        ("memprof suggest run.memprof --forbid sh", ["shard"]),
        ("memprof export run.memprof --tables ops,sto", ["ops,storages"]),
        ("memprof record --checkpoint ", ["layers.*"]),
    ],
)
def test_values_are_offered(
    words: str, some: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verbs, formats, devices, policies, planners and tables, by how they begin."""
    found = values(offered(folder, words, monkeypatch, capsys))
    assert set(some) <= set(found)
    assert all(value.startswith(words.rpartition(" ")[2]) for value in found)


def test_what_is_offered_is_understood(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every device, policy, planner, table and setting that is offered is read by what takes it."""
    machines = values(offered(folder, "memprof diff --device ", monkeypatch, capsys))
    assert [find_machine(name) for name in machines] == list(accelerators())
    cards = values(offered(folder, "memprof record --device ", monkeypatch, capsys))
    assert cards
    assert all(find_card(name).machine == find_machine(name) for name in cards)
    policies = values(offered(folder, "memprof suggest --allow ", monkeypatch, capsys))
    assert policies == [kind.name for kind in policy_types()]
    planners = values(offered(folder, "memprof suggest --planner ", monkeypatch, capsys))
    assert planners == [kind.name for kind in planner_types()]
    assert values(offered(folder, "memprof export --tables ", monkeypatch, capsys)) == [
        kind.table_name for kind in TABLES
    ]
    for kind in policy_types():
        for word in kind.flag_words:
            kind.from_flag(f"{word}:2" if kind.name == "shard" else word)


def test_a_verb_that_runs_offers_nothing() -> None:
    """What completion needs is imported by completion alone."""
    script = "import sys; from memprof.cli.main import main; main(['export', '-h']); print('memprof.cli.completing' in sys.modules)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"


def run_bash(folder: Path, line: str) -> list[str]:
    """Completes the last word of a line in a real bash, which asks a real memprof."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f'eval "$({BIN}/memprof completion bash)"; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; '
        f"_memprof_completion_files {BIN}/memprof '{words[-1]}' '{words[-2]}'; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(folder: Path) -> None:
    """The printed script, in bash itself: recordings, one with a blank in its name, and a folder."""
    assert run_bash(folder, "memprof report ") == ["other run.memprof", "run.memprof", "run.memprof.spool", "runs"]
    assert run_bash(folder, "memprof sugg") == ["suggest"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks by the variable that memprof answers; where the shell is installed, it finds no fault in it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_MEMPROF_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, env=os.environ, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With those there are."""
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


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
