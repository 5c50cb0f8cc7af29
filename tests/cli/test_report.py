"""`memprof report` as it is typed and read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.analysis.table import sized_parts
from memprof.cli.main import main
from memprof.cli.page import Page
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Backend, Capture, Manifest
from memprof.trace.schema import HostMemory
from memprof.trace.store import write_trace
from memprof.units import printable
from tests.building import Module, Op, Storage, Tables, make_tables
from tests.trace.importers.writing import small_job, write

MIB = 2**20
TABLES = ("category", "module", "op", "source", "stack", "phase", "storage")


def model_tables(layers: int = 4, name: str = "mlp") -> Tables:
    """A model of like layers: each keeps 2 MiB for backward, of 1 MiB of weights."""
    forward, backward, storages = [], [], [Storage("x", MIB, "input", shape="8x8", dtype="int64")]
    for layer in range(layers):
        module, before = f"layers.{layer}.{name}", f"y{layer - 1}" if layer else "x"
        own = f"/job/net/model.py:{layer + 1}:forward\n/job/train.py:9:main"
        stack = f"/v/site-packages/torch/nn/linear.py:1:forward\n{own}"
        storages += [
            Storage(f"w{layer}", MIB, "parameter", f"{module}.weight", module),
            Storage(f"y{layer}", 2 * MIB, shape="16x128x512", module=module),
        ]
        op = Op("aten.mm.default", "forward", module, [f"y{layer}"], [before, f"w{layer}"], saves=[before], stack=stack)
        forward.append(op)
        reads = [before, f"y{layer}"]
        backward.append(
            Op("aten.mm.default", "backward", module, reads=reads, frees=[f"y{layer}"], forward=layer, stack=stack)
        )
    update = Op("aten.add_.Tensor", "optimizer", reads=["x"], mutates=["w0"])
    modules = [
        Module("", "Net"),
        Module("layers", "ModuleList"),
        *(Module(f"layers.{n}", "Block") for n in range(layers)),
    ]
    return make_tables([[*forward, *reversed(backward), update]] * 2, storages, modules)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.memprof"
    write_trace(path, [(Manifest(target="/job/train.py"), model_tables())])
    return path


def report(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(["report", *map(str, words)]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_the_first_line_is_the_verdict(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 x 1 MiB of weights, 4 x 2 MiB of activations and 1 MiB of input: 13 MiB, 8/13 = 62 % activations."""
    assert report(capsys, model_file).splitlines()[0] == (
        "peak 13.00 MiB allocated in step 1, forward of layers.3.mlp (aten.mm.default), net/model.py:4; "
        "62 % activations"
    )


def test_the_last_lines_say_what_to_type_next(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands can be copied, and work."""
    out = report(capsys, model_file)
    commands = [line.removeprefix("next: ").split("  ")[0] for line in out.splitlines() if line.startswith("next: ")]
    assert out.rstrip().splitlines()[-1].startswith("next: memprof report ")
    for command in commands:
        report(capsys, *command.split()[2:])


def test_the_report_has_every_table(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In an order that goes from the whole to the detail."""
    out = report(capsys, model_file)
    titles = [
        "by category",
        "each phase",
        "by module",
        "by operator",
        "by source line",
        "Largest",
        "Saved",
        "Recompute",
    ]
    places = [out.index(title) for title in titles]
    assert places == sorted(places)


def test_like_layers_share_a_row_until_asked_for(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers are one row; with --by module each has its own."""
    assert re.search(r"^    \* Block x4 +12\.00 MiB +92\.3 %", report(capsys, model_file), re.MULTILINE)
    assert re.search(r"^    3 Block +3\.00 MiB +23\.1 %", report(capsys, model_file, "--by", "module"), re.MULTILINE)


@pytest.mark.parametrize("table", TABLES)
def test_one_table_alone(model_file: Path, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Still under the verdict, with fewer sections."""
    out = report(capsys, model_file, "--by", table)
    assert out.startswith("peak 13.00 MiB")
    assert len(re.findall(r"^$", out, re.MULTILINE)) < len(re.findall(r"^$", report(capsys, model_file), re.MULTILINE))


@pytest.mark.parametrize("table", ["op", "source", "stack", "module"])
@pytest.mark.parametrize("top", [1, 2, 3, 50])
def test_shown_rows_sum_to_the_whole(
    model_file: Path, table: str, top: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many rows are cut, the shares of those shown are 100 % (of a tree: of those that are not indented)."""
    lines = report(capsys, model_file, "--by", table, "--top", top).splitlines()
    rows = lines[4 : lines.index("", 4)]  # below the verdict, a blank, the title and the header
    if table == "module":
        rows = [row for row in rows if not row.startswith(" ")]
    shares = [float(match[1]) for row in rows if (match := re.search(r"([\d.]+) %", row))]
    assert sum(shares) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--at", "99"], 2, "operators 0 to 8"),
        (["--at", "somewhere"], 2, "STEP:OP"),
        (["--at", "1:"], 2, "STEP:OP"),
        (["--at", "-3"], 2, "STEP:OP"),
        (["--at", "0:1", "--step", "1"], 2, "both choose a step"),
        (["--step", "7"], 2, "step 7"),
        (["--rank", "3"], 2, "rank 3"),
        (["--by", "colour"], 2, "colour"),
        (["--top", "0"], 2, "--top"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    model_file: Path, words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a message with the valid values."""
    assert message in report(capsys, model_file, *words, status=status)


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 5, and its name."""
    assert "none.memprof" in report(capsys, tmp_path / "none.memprof", status=5)


def test_gaps_come_right_after_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An incomplete capture is warned about before any table; blind spots are noted after them."""
    capture = Capture(False, "step 3, backward of layers.31.mlp", "", -9)
    manifest = Manifest(capture=capture, backend=Backend("cpu-native", (), ("numpy's memory",)))
    write_trace(tmp_path / "cut.memprof", [(manifest, model_tables())])
    lines = report(capsys, tmp_path / "cut.memprof").splitlines()
    assert lines[1] == ("warning: the capture is incomplete: it ends in step 3, backward of layers.31.mlp (SIGKILL).")
    assert "note: not seen by cpu-native: numpy's memory" in lines


def test_several_ranks_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank with the highest peak is shown, and the verdict names it."""
    ranks = [(Manifest(rank=rank, world_size=2), model_tables(layers)) for rank, layers in enumerate((2, 3))]
    write_trace(tmp_path / "two.memprof", ranks)
    out = report(capsys, tmp_path / "two.memprof")
    assert out.startswith("peak 10.00 MiB allocated in step 1 of rank 1, ")
    assert re.search(
        r"^ +1 +cpu +10\.00 MiB +\+[\d.]+ MiB +forward +.* 1\.0 ms +highest, shown below$", out, re.MULTILINE
    )


def test_ranks_have_a_page_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--by rank` names the worst, says how far the ranks lie apart and in what, and reads no rank's own tables."""
    ranks = [(Manifest(rank=rank, world_size=3), model_tables(layers)) for rank, layers in enumerate((2, 3))]
    write_trace(tmp_path / "two.memprof", ranks)
    out = report(capsys, tmp_path / "two.memprof", "--by", "rank")
    lines = out.splitlines()
    assert lines[0].startswith("rank 1 is worst of 2: peak 10.00 MiB in forward")
    assert lines[1] == "warning: Of 3 ranks, rank 2 is missing: there is no recording of it here."
    assert "Spread by phase  peaks" in lines
    assert lines[-1].startswith(f"next: memprof report {tmp_path / 'two.memprof'} --rank 1")
    found = json.loads(report(capsys, tmp_path / "two.memprof", "--by", "rank", "--json"))
    assert found["worst_rank"] == 1
    assert found["peak_spread"]["most_bytes"] == found["ranks"][1]["peak_allocated_bytes"]


def test_a_rank_that_was_dry_run_is_listed_with_those_that_do_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight ranks two were run, and the second stands for six more."""
    dry = Backend(DRY_RUN)
    manifests = [
        Manifest(rank=0, world_size=8, backend=dry),
        Manifest(rank=1, world_size=8, backend=dry, same_ranks=(2, 3, 4, 5, 6, 7)),
    ]
    write_trace(tmp_path / "dry.memprof", [(one, model_tables(2)) for one in manifests])
    out = report(capsys, tmp_path / "dry.memprof", "--by", "rank")
    assert re.search(r"^ +1 +2 to 7 +cpu ", out, re.MULTILINE)
    found = json.loads(report(capsys, tmp_path / "dry.memprof", "--by", "rank", "--json"))
    assert [one["same_ranks"] for one in found["ranks"]] == [[], [2, 3, 4, 5, 6, 7]]


def test_very_many_ranks_are_cut_to_the_fullest_and_the_emptiest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of twelve ranks a report lists eight rows, and says how many lie between."""
    ranks = [(Manifest(rank=rank, world_size=12), model_tables(1 + rank)) for rank in range(12)]
    write_trace(tmp_path / "many.memprof", ranks)
    out = report(capsys, tmp_path / "many.memprof")
    assert "4 ranks between" in out
    rows = [line.split()[0] for line in out.split("Ranks\n")[1].split("\n\n")[0].splitlines()[1:]]
    assert rows == ["11", "10", "9", "8", "7", "6", "5", "...", "0"]


def test_the_page_of_ranks_is_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank, step or moment has no place on it."""
    write_trace(tmp_path / "one.memprof", [(Manifest(), model_tables())])
    assert main(["report", str(tmp_path / "one.memprof"), "--by", "rank", "--rank", "0"]) == 2
    assert "leave out --rank, --step and --at" in capsys.readouterr().err


def test_host_memory_is_shown_by_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer's highest, and the largest of its workers."""
    tables = model_tables()
    tables[HostMemory] = HostMemory.of(
        time_us=[1.0, 1, 1],
        pid=[1, 2, 3],
        role=["trainer", "worker", "worker"],
        rss_bytes=[9 * MIB, 2 * MIB, 3 * MIB],
        private_bytes=[5 * MIB, MIB, MIB],
    )
    write_trace(tmp_path / "host.memprof", [(Manifest(), tables)])
    out = report(capsys, tmp_path / "host.memprof")
    assert re.search(r"^trainer +9\.00 MiB +5\.00 MiB$", out, re.MULTILINE)
    assert re.search(r"^2 workers, largest +3\.00 MiB +1\.00 MiB$", out, re.MULTILINE)


def test_piped_output_is_plain_and_uncut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequences, no trailing blanks, and a long module's name in full."""
    name = "a_very_long_module_name_that_no_terminal_of_eighty_columns_holds_beside_its_figures"
    write_trace(tmp_path / "long.memprof", [(Manifest(), model_tables(1, name))])
    out = report(capsys, tmp_path / "long.memprof")
    assert "\x1b" not in out
    assert f"layers.0.{name}.weight" in out
    assert not re.search(r" +$", out, re.MULTILINE)


def test_names_of_the_job_are_shown_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither rich's markup nor a terminal's escape sequences in a module's name have any effect."""
    write_trace(tmp_path / "odd.memprof", [(Manifest(), model_tables(1, "[red]x[/]\x1b[31m:smile:"))])
    out = report(capsys, tmp_path / "odd.memprof", "--by", "storage")
    assert "[red]x[/]\\x1b[31m:smile:" in out
    assert "\x1b" not in out


def test_json_is_the_whole_report(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are not folded, whatever table is asked for."""
    result = json.loads(report(capsys, model_file, "--json", "--by", "op"))
    assert result["schema"] == 1
    assert result["peak"]["allocated_bytes"] == 13 * MIB
    assert result["peak"]["source"] == "net/model.py:4"
    assert [row["module"] for row in result["at_peak"]["by_module"] if row["bytes"] == 3 * MIB] == [
        f"layers.{layer}.mlp" for layer in range(4)
    ]


def on_terminal(file: Path, columns: int, **environment: str) -> list[str]:
    """Runs a report on a terminal of its own."""
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "memprof.cli.main", "report", str(file)],
        stdout=slave,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux ends a closed terminal so
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    assert process.wait(60) == 0
    return b"".join(chunks).decode().splitlines()


def test_a_terminal_gets_colours_within_its_width(model_file: Path) -> None:
    """At 80 columns no line is longer, and the figures are whole."""
    lines = on_terminal(model_file, 80)
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert plain != lines
    assert max(map(len, plain)) <= 80
    assert any("13.00 MiB  100.0 %" in line for line in plain)


def test_no_color_is_honoured(model_file: Path) -> None:
    """No escape sequence at all."""
    assert not any("\x1b" in line for line in on_terminal(model_file, 80, NO_COLOR="1"))


def test_force_color_colours_a_pipe(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For continuous integration, whose logs show colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in report(capsys, model_file)


def test_a_narrow_encoding_is_no_error(model_file: Path) -> None:
    """A character that stdout cannot hold becomes a question mark."""
    result = subprocess.run(
        [sys.executable, "-m", "memprof.cli.main", "report", str(model_file)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1", "COLUMNS": "40"},
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"?" in result.stdout


def test_verbs_of_files_import_nothing_large(model_file: Path, tmp_path: Path) -> None:
    """They run on a laptop or a CI machine without torch, and start sooner without pandas and scipy."""
    name, imported = str(model_file), str(tmp_path / "imported.memprof")
    pickled = str(write(tmp_path / "snapshot.pickle", small_job()))
    gate = ["diff", name, "--fail-on", "peak>1TiB"]
    words = [["report", name], ["diff", name, name], gate, ["import", pickled, "-o", imported]]
    script = (
        f"import sys; from memprof.cli.main import main; found = [main(words) for words in {words!r}]; "
        "large = {'torch', 'dash', 'plotly', 'scipy', 'pandas'} & set(sys.modules); "
        "print(found, sorted(large), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stderr.splitlines()[-1] == "[0, 0, 0, 0] []", result.stderr


def test_columns_are_aligned() -> None:
    """Numbers end in one column, also where names hold wide or combining letters."""
    page = Page(is_terminal=False, width=1000, has_colour=False)
    page.add(sized_parts("name", {"a": 1, "longer": 1000}, 1000))
    assert page.render() == "name     bytes    share\na          1 B    0.1 %\nlonger  1000 B  100.0 %\n"


def test_control_characters_are_written_out() -> None:
    """A newline in a name would tear the table, an escape would reach the terminal; letters stay as they are."""
    assert printable("ä\n\x1b[2J\u202e") == "ä\\n\\x1b[2J\\u202e"
