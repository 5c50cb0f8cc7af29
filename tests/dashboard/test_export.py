"""A report as one HTML file: its content, and that names from a recording are escaped."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.analysis.export.scrub import scrubbed
from memprof.analysis.report.report import build_report
from memprof.cli.main import main
from memprof.errors import BadInputError, UsageError
from memprof.trace.manifest import Backend, Capture, Machine, Manifest
from memprof.trace.store import Trace, write_trace
from memprof.units import format_bytes, parse_bytes
from memprof_dashboard.export_page import export
from memprof_dashboard.export_page.export import export_html
from tests.building import Module, Op, Storage, make_tables, make_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
GIB = 2**30
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)' x=\"",
    "<!--<script>",
    "{{plotly}}",
    "\u202egnp.exe\u200f\x1b[31m",
    "n" * 10_000,
    "%{y}<a href='javascript:alert(1)'>",
)


class Read(HTMLParser):
    """A page as a browser reads it: its elements, and what stands in them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._is_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[-1] += data
        else:
            self.text += data

    def figures(self) -> dict[str, Any]:
        """Returns what is drawn, in both themes."""
        content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(self.scripts[0])))
        return content


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omits plotly.js, which does not depend on the recording."""
    monkeypatch.setattr(export, "plot_bundle", lambda: gzip.compress(b"/* plotly */", mtime=0))


def numbers(column: Any) -> np.ndarray:
    """Reads a column of a figure."""
    if isinstance(column, dict):
        return np.frombuffer(base64.b64decode(column["bdata"]), dtype=column["dtype"])
    return np.asarray(column)


def hostile_trace(name: str) -> Trace:
    """A recording in which everything that can be named has a hostile name."""
    # Modules are separated by dots, which would make parents of the name.
    module = name.replace(".", "_")
    ops = [Op(name, makes=["a"], reads=["w"], module=module, stack=f"/job/{name.splitlines()[0]}.py:3:{name}")]
    storages = [Storage("w", 1024, "parameter", name, module, shape=name), Storage("a", 2048, name, module=module)]
    manifest = Manifest(
        target=name,
        command=("python", name),
        notes=(name,),
        torch_version=name,
        op_times=name,
        machine=Machine(device_name=name, os=name, allocator_settings=name),
        backend=Backend(name, (name,), (name,)),
        capture=Capture(False, name, name),
    )
    return make_trace([ops], storages, [Module(module, name)], manifest=manifest)


@pytest.mark.parametrize("sample", ["gpt", "lstm", "resnet"])
def test_the_drawn_peak_is_the_true_peak(sample: str) -> None:
    """In both themes, the timeline's highest point is the step's peak to the byte, and the treemap is as large."""
    trace = Trace.open(SAMPLES / sample / "run.memprof")
    peak = build_report(trace).at_peak.moment.allocated_bytes
    page = export_html(trace)
    assert len(page.encode()) < 6_000_000
    themes = Read(page).figures()["themes"]
    assert set(themes) == {"light", "dark"}
    for figures in themes.values():
        timeline = figures["timeline"]
        (total,) = [line for line in timeline["data"] if line["name"] == "total"]
        unit = timeline["layout"]["yaxis"]["title"]["text"]
        assert numbers(total["y"]).max() * parse_bytes(f"1 {unit}") == peak
        assert f"peak {format_bytes(peak)}" in [note["text"] for note in timeline["layout"]["annotations"]]
        (treemap,) = figures["treemap"]["data"]
        assert numbers(treemap["values"]).max() == peak


@pytest.mark.usefixtures("without_plotly")
def test_the_page_says_what_somebody_out_of_memory_asks() -> None:
    """Peak, place, largest part, lines, blind spots and the commands stand there, the peak first."""
    text = Read(export_html(Trace.open(SAMPLES / "gpt" / "run.memprof"))).text
    wanted = [
        "train.py peaks at 88.92 MiB",
        "93,237,072 B, step 4",
        "75.46 MiB, 84.9 %",
        "Memory during step 4",
        "Whole recording",
        "Live bytes at the peak, by category",
        "Live bytes at the peak, by module",
        "Live bytes at the peak, by source line",
        "train.py:51",
        "Treemap at the peak",
        "Largest storages at the peak",
        "layers.0.mlp.0",
        "Host memory",
        "private",
        "Recording details",
        "2.13.0+cpu",
        "allocations on other threads of the job",
        "memprof record -o run.memprof --skip 2 --steps 3 -- ",
    ]
    place = 0
    for words in wanted:
        assert words in text[place:]
        place = text.index(words, place)


@pytest.mark.usefixtures("without_plotly")
def test_room_on_the_device() -> None:
    """For a device with its own memory, the page shows the headroom above the peak, or the excess over capacity."""
    ops, storages = [Op(makes=["a"])], [Storage("a", 3 * GIB)]
    machine = Machine(device_name="H100", device_kind="cuda", capacity_bytes=4 * GIB)
    page = export_html(make_trace([ops], storages, manifest=Manifest(machine=machine)))
    assert "1.00 GiB above the peak" in Read(page).text
    shapes = Read(page).figures()["themes"]["light"]["timeline"]["layout"]["shapes"]
    assert [shape["y0"] for shape in shapes if shape["line"].get("dash") == "longdashdot"] == [4.0]
    machine = Machine(device_kind="cuda", capacity_bytes=2 * GIB)
    page = export_html(make_trace([ops], storages, manifest=Manifest(machine=machine)))
    assert "peak is 1.00 GiB over capacity" in Read(page).text


@pytest.mark.usefixtures("without_plotly")
def test_hostile_names_are_text() -> None:
    """No name of a recording becomes an element, an attribute, a script or a direction of writing; long ones end."""
    plain = export_html(hostile_trace("plain"))
    known = {(tag, attribute) for tag, attributes in Read(plain).elements for attribute in (*attributes, "")}
    for name in HOSTILE:
        page = export_html(hostile_trace(name))
        read = Read(page)
        assert len(read.scripts) == 3, name
        assert read.scripts[1:] == Read(plain).scripts[1:], name
        found = {(tag, attribute) for tag, attributes in read.elements for attribute in (*attributes, "")}
        assert found <= known | {("span", "title"), ("wbr", "")}, name
        assert not re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069\x1b]", page), name
        assert len(page) < 3 * len(plain) + 100_000, name
        shown = json.dumps(read.figures())
        assert not any(markup in shown for markup in ("<img", "<script", "<a href")), name


@pytest.mark.usefixtures("without_plotly")
@settings(max_examples=8)
@given(
    name=st.text(min_size=1, max_size=40).filter(lambda name: bool(name.splitlines()) and bool(name.splitlines()[0]))
)
def test_any_name_leaves_the_page_as_it_is(name: str) -> None:
    """Whatever things are called, the page has its three scripts, and what it draws can be read."""
    read = Read(export_html(hostile_trace(name)))
    assert len(read.scripts) == 3
    assert set(read.figures()["themes"]["light"]) == {"timeline", "overview", "treemap"}


def test_the_policy_allows_the_pages_own_scripts_alone() -> None:
    """The page forbids every request, and lets exactly the two scripts run that are in it."""
    read = Read(export_html(make_trace([[Op(makes=["a"])]], [Storage("a", 8)])))
    (policy,) = [attributes["content"] for _, attributes in read.elements if attributes.get("http-equiv")]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    plotly = gzip.decompress(base64.b64decode(read.scripts[1])).decode()
    allowed = (plotly, read.scripts[2])
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in allowed]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]
    assert "connect-src" not in rules
    assert not [attributes for _, attributes in read.elements if "src" in attributes]
    links = [str(attributes["href"]) for _, attributes in read.elements if "href" in attributes]
    places = {f"#{attributes['id']}" for _, attributes in read.elements if "id" in attributes}
    assert links
    assert places >= set(links)


def test_a_page_holds_the_part_of_plotly_that_it_draws_with() -> None:
    """Compressed, and of the release that the build names: a report can be attached to an issue."""
    page = export_html(make_trace([[Op(makes=["a"])]], [Storage("a", 8)]))
    assert len(page) < 800_000
    release = json.loads((SAMPLES.parent / "packaging" / "plot_bundle" / "package.json").read_text("utf-8"))
    named = f"plotly.js {release['dependencies']['plotly.js']}, in part: scatter, bar and treemap"
    bundle = gzip.decompress(export.plot_bundle()).decode()
    assert named in bundle


def test_a_page_holds_the_licences_of_what_it_draws_with() -> None:
    """They require it of every copy, and a report is passed on alone."""
    licences = files("memprof_dashboard.export_page").joinpath("plotly.LICENSE.txt").read_text(encoding="utf-8")
    assert gzip.decompress(export.plot_bundle()).decode().endswith(f"{licences}*/\n")
    for package in ("plotly.js", "@plotly/d3", "d3-format", "d3-hierarchy", "culori", "gl-mat4", "polybooljs"):
        assert re.search(rf"^{package} [\d.]+ \((MIT|BSD-3-Clause|Zlib)\)\n\n", licences, re.MULTILINE)


@pytest.mark.usefixtures("without_plotly")
def test_another_moment_step_and_rank() -> None:
    """The tables show the requested moment, and the page says so."""
    trace = Trace.open(SAMPLES / "gpt" / "run.memprof")
    text = Read(export_html(trace, step_number=3, op_id=10, rows=2)).text
    assert "Live bytes during operator 10, by category" in text
    assert "Operator 10 of the 1,024 of step 3" in text
    assert "--at 3:10 --html" in text
    tables = make_tables([[Op(makes=["a"])]], [Storage("a", 8)])
    ranks = Trace.of([(Manifest(rank=rank, world_size=2), tables) for rank in (0, 1)], "two.memprof")
    assert "step 0 of rank 1" in Read(export_html(ranks, rank=1)).text
    with pytest.raises(UsageError, match="no operator 99"):
        export_html(ranks, op_id=99)
    with pytest.raises(BadInputError, match="holds no operators"):
        export_html(make_trace([[]], []))


@pytest.mark.usefixtures("without_plotly")
@settings(max_examples=8)
@given(
    person=st.text("bcdfghjklmnpqrstvwxz", min_size=6, max_size=9),
    folder=st.text("abcdefXYZ 0123456789_-é", min_size=3, max_size=12).filter(lambda name: name == name.strip(" -_")),
)
def test_a_scrubbed_page_holds_no_absolute_path(person: str, folder: str) -> None:
    """Of a scrubbed recording, no path of the original and no name of its owner is anywhere in the page."""
    home = f"/home/{person}"
    paths = [f"{home}/{folder}/train.py", f"{home}/{folder}/net/model.py", f"{home}/lib/site-packages/torch/nn.py"]
    manifest = Manifest(
        command=(f"{home}/bin/python", paths[0], f"--data={home}/data"),
        target=paths[0],
        notes=(f"wrote {home}/{folder}/log.txt",),
    )
    stack = "\n".join(f"{path}:7:run" for path in paths)
    trace = make_trace([[Op(makes=["a"], stack=stack)]], [Storage("a", 8)], manifest=manifest)
    assert person in export_html(trace).replace("<wbr>", "")
    page = export_html(scrubbed(trace)).replace("<wbr>", "")
    assert person not in page
    assert "/home" not in page
    assert "train.py:7" in page


def run(*words: object) -> int:
    return main(["report", *map(str, words)])


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--html writes only the page, and prints its path."""
    page = tmp_path / "out.html"
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", page, "--scrub") == 0
    assert list(tmp_path.iterdir()) == [page]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"memprof: wrote {page}\n"


def test_a_page_is_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is there is refused before the recording is even looked for; -f replaces it."""
    page = tmp_path / "out.html"
    page.write_text("mine")
    assert run(tmp_path / "missing.memprof", "--html", page) == 2
    assert "exists already. Replace it with -f" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert run(tmp_path / "missing.memprof", "--html", page, "-f") == 5
    assert page.read_text() == "mine"
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", page, "-f") == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full, the old page stays complete and no partial one is left."""
    page = tmp_path / "out.html"
    page.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", page, "-f") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    assert page.read_text() == "old"


@pytest.mark.parametrize("other", [["--json"], ["--by", "module"]])
def test_a_page_holds_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: list[str]) -> None:
    """Options of other outputs cannot be combined with --html."""
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", tmp_path / "x.html", *other) == 2
    assert "leave out --by and --json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page in a missing folder is refused with a message."""
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", tmp_path / "no" / "x.html") == 2
    assert "no folder" in capsys.readouterr().err


def test_without_plotly_the_command_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the figures cannot be drawn, a message says what to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "plotly" else found(name, *rest)
    )
    assert run(SAMPLES / "lstm" / "run.memprof", "--html", tmp_path / "x.html") == 2
    assert "pip install 'torch-memprof[dashboard]'" in capsys.readouterr().err


def test_scrubbing_is_for_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--scrub takes paths out of the text and the JSON too."""
    path = tmp_path / "run.memprof"
    op = Op(makes=["a"], stack="/home/alice/net/a.py:1:f\n/home/alice/train.py:2:main")
    manifest = Manifest(target="train.py", command=("/home/alice/bin/python", "train.py"))
    write_trace(path, [(manifest, make_tables([[op]], [Storage("a", 8)]))])
    for words in (["--json"], []):
        assert run(path, *words) == 0
        whole = capsys.readouterr().out
        assert run(path, "--scrub", *words) == 0
        clean = capsys.readouterr().out
        assert str(tmp_path) not in clean
        assert "alice" not in clean
        assert "net/a.py" in clean
        assert "net/a.py" in whole
