"""Removing people, hosts, paths and arguments from a recording."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.analysis.export.scrub import scrubbed
from memprof.analysis.report.report import build_report
from memprof.analysis.report.report_json import report_to_json
from memprof.analysis.report.sources import find_sources
from memprof.trace.files.coded import Coded
from memprof.trace.manifest import Capture, Machine, Manifest
from memprof.trace.schema import TABLES, Ops, Stacks, Storages
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, assert_tables_equal, make_tables, make_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
SAYS_SO = "Arguments, paths, and names of people and hosts were removed from this recording."

OWN = "/home/alice/secret project/net/model.py:7:forward"
STACK = "\n".join(
    [
        "/home/alice/.venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:1:forward",
        OWN,
        "/home/alice/.venv/lib/python3.11/site-packages/transformers/trainer.py:5:step",
        "/usr/lib/python3.11/threading.py:9:run",
        "/tmp/torchinductor_alice/ab/cab.py:3:call",
        "<frozen runpy>:88:_run_code",
        "/home/alice/secret project/train.py:12:main",
    ]
)


def trace_of(manifest: Manifest, stack: str = STACK) -> Trace:
    return make_trace(
        [[Op("aten.mm.default", makes=["a"], stack=stack, module="fc")]], [Storage("a", 1024)], manifest=manifest
    )


def texts_of(trace: Trace) -> str:
    """Everything a recording says, as one text."""
    tables = [
        str(value)
        for kind in TABLES
        for column in kind.columns()
        if column.kind == "text"
        for value in getattr(trace.table(kind), column.name).tolist()
    ]
    return "\n".join([str(trace.path), json.dumps(trace.manifest.to_json(), ensure_ascii=False), *tables])


def test_files_are_shown_below_the_jobs_own_folder() -> None:
    """Own files keep their place below their folder, libraries theirs below site-packages or the standard library."""
    (frames,) = scrubbed(trace_of(Manifest())).table(Stacks).frames
    assert frames.splitlines() == [
        "…/site-packages/torch/nn/modules/linear.py:1:forward",
        "net/model.py:7:forward",
        "…/site-packages/transformers/trainer.py:5:step",
        "…/lib/python3.11/threading.py:9:run",
        "…/torchinductor_/ab/cab.py:3:call",
        "<frozen runpy>:88:_run_code",
        "train.py:12:main",
    ]


@pytest.mark.parametrize("sample", ["gpt", "lstm", "resnet"])
def test_reports_name_the_same_lines(sample: str) -> None:
    """A report of a scrubbed recording says what it said before, but for the files' absolute paths."""
    trace = Trace.open(SAMPLES / sample / "run.memprof")
    clean = scrubbed(trace)
    before, after = (report_to_json(build_report(one), 20) for one in (trace, clean))
    assert find_sources(clean.table(Stacks)).user_frames != ()
    for split in ("by_category", "by_module", "by_op"):
        assert after["at_peak"][split] == before["at_peak"][split]
    for mine, theirs in zip(after["at_peak"]["by_source"], before["at_peak"]["by_source"], strict=True):
        assert {**mine, "file": None} == {**theirs, "file": None}
    assert '"/' in json.dumps(before)
    assert '"/' not in json.dumps(after)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/home/alice/.venv/bin/python", "train.py"], ["python", "train.py"]),
        (["python", "/home/alice/secret project/net/model.py"], ["python", "model.py"]),
        (["python", "/mnt/run_alice.py"], ["python", "run_….py"]),
        (["python", "t.py", "--data=/mnt/acme/imagenet"], ["python", "t.py", "--data=…"]),
        (["python", "t.py", "-k", "SECRETK", "--pat", "X"], ["python", "t.py", "-k", "…", "--pat", "…"]),
        (["python", "t.py", "--h", "dgx-07.acme.internal"], ["python", "t.py", "--h", "…"]),
        (["python", "t.py", "--name", "run_alice", "5"], ["python", "t.py", "--name", "…", "…"]),
        (["python", "t.py", "lr=1e-3", "++net.name=x", "ALICE_KEY=x"], ["python", "t.py", "lr=…", "++net.name=…", "…"]),
        (["python", "t.py", "-I/usr/include", "-pSECRET"], ["python", "t.py", "-I…", "-p…"]),
        (["torchrun", "--rdzv-endpoint=node17:29500", "a.py"], ["torchrun", "--rdzv-endpoint=…", "…"]),
        (["bash", "-c", "TOKEN=x python train.py"], ["bash", "-c", "…"]),
        (
            ["python", "t.py", "~/data", "file:///home/alice/x", "alice-3"],
            ["python", "t.py", "…", "…", "…"],
        ),
        (["/opt/acme-tool/acme", "--alice-mode"], ["…", "--…-mode"]),
        (["C:\\Users\\alice\\python.exe", "C:\\Users\\alice\\data"], ["python.exe", "…"]),
    ],
)
def test_command_lines(words: list[str], shown: list[str]) -> None:
    """Of a command line the program, its script and the names of options stay, and not one value."""
    assert list(scrubbed(trace_of(Manifest(command=tuple(words))), names=["alice"]).manifest.command) == shown


@pytest.mark.parametrize(
    ("note", "shown"),
    [
        ("read /home/alice/secret project/data/x.bin twice", "read data/x.bin twice"),
        ("spilled to /mnt/fast/alice/tmp.", "spilled to …"),
        ("by alice@node17.cluster:22 (10.0.0.7)", "by … (…)"),
        ("Alice's run, WANDB_API_KEY=abc set", "…'s run, … set"),
        ("forward/backward rounds and/or 1.5 GiB/s", "forward/backward rounds and/or 1.5 GiB/s"),
        ("see https://wiki.acme/alice", "see …"),
    ],
)
def test_notes(note: str, shown: str) -> None:
    """Sentences lose paths, addresses, people and secrets, and nothing else; the last one says what was done."""
    assert scrubbed(trace_of(Manifest(notes=(note,)))).manifest.notes == (shown, SAYS_SO)


def test_what_a_machine_is_stays() -> None:
    """Device, capacity and versions stay; the kernel's own name, which may name a host, does not."""
    machine = Machine(device_name="NVIDIA H100", device_kind="cuda", capacity_bytes=80, os="Linux 6.8.0-acme-node17")
    capture = Capture(False, "step 3, backward of fc", "killed on node17 by /home/alice/watch.sh")
    manifest = Manifest(torch_version="2.13.0", machine=machine, capture=capture, plan={"swap": {"to": "/mnt/alice"}})
    clean = scrubbed(trace_of(manifest), names=["node17"]).manifest
    assert clean.machine == dataclasses.replace(machine, os="Linux 6.8.0")
    assert clean.capture == Capture(False, "step 3, backward of fc", "killed on … by …/watch.sh")
    assert clean.plan == {"swap": {"to": "…"}}
    assert clean.torch_version == "2.13.0"


def test_the_original_stays_and_numbers_are_the_same(tmp_path: Path) -> None:
    """Scrubbing changes no number and nothing in the recording it is made of; the copy can be written and read."""
    trace = trace_of(Manifest(command=("python", "/home/alice/x.py")))
    before = texts_of(trace)
    clean = scrubbed(trace)
    for kind in TABLES:
        changed = {
            column.name: getattr(trace.table(kind), column.name) for column in kind.columns() if column.kind == "text"
        }
        assert_tables_equal(clean.table(kind).replace(**changed), trace.table(kind))
    assert texts_of(trace) == before
    write_trace(tmp_path / "clean.memprof", [(clean.manifest, {kind: clean.table(kind) for kind in TABLES})])
    assert texts_of(Trace.open(tmp_path / "clean.memprof")).split("\n")[1:] == texts_of(clean).split("\n")[1:]


def test_columns_read_alone_are_scrubbed_too() -> None:
    """What is read as single columns says the same as the tables."""
    tables = make_tables([[Op("aten.mm.default", makes=["a"])]], [Storage("a", 8, name="/home/alice/w")])
    clean = scrubbed(Trace.of([(Manifest(), tables)], "/home/alice/run.memprof"))
    column = clean.columns(Storages, "name", "allocated_bytes")
    assert isinstance(column["name"], Coded)
    assert column["name"].distinct[column["name"].codes].tolist() == clean.table(Storages).name.tolist() == ["…"]
    assert column["allocated_bytes"].tolist() == [8]
    assert clean.columns(Ops, "name")["name"].distinct.tolist() == ["aten.mm.default"]
    assert str(clean.path) == "run.memprof"


def test_every_rank_is_scrubbed() -> None:
    """The other ranks of a job reveal no more than the one that is shown."""
    tables = make_tables([[Op(makes=["a"], stack=OWN)]], [Storage("a", 8)])
    trace = Trace.of([(Manifest(rank=rank, command=("/home/alice/py",)), tables) for rank in (0, 1)], "run.memprof", 1)
    clean = scrubbed(trace)
    assert (clean.rank, clean.ranks) == (1, (0, 1))
    for rank in clean.ranks:
        assert "alice" not in texts_of(clean.rank_trace(rank))
        assert clean.rank_trace(rank).manifest.rank == rank


def test_files_without_a_common_folder_stay_apart() -> None:
    """Files of one name whose folders share only the root are shown without them, and distinguished."""
    clean = scrubbed(trace_of(Manifest(), "/a/model.py:1:f\n/b/model.py:1:f\n/c/other.py:2:g"))
    assert clean.table(Stacks).frames[0].splitlines() == ["model.py:1:f", "model.py (2):1:f", "other.py:2:g"]


NAMES = st.text("abcdefgXYZ 0123456789_-.é", min_size=3, max_size=12).filter(
    lambda name: name.strip(" .-_") == name and any(map(str.isalpha, name))
)


@settings(max_examples=60)
@given(
    root=st.sampled_from(["/home", "/Users", "/mnt/home", "/scratch", "/gpfs/work"]),
    person=st.text("bcdfghjklmnpqrstvwxz", min_size=6, max_size=9),
    folders=st.lists(NAMES, min_size=1, max_size=3),
    files=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    elsewhere=st.lists(NAMES.filter(lambda name: " " not in name), min_size=1, max_size=3),
)
def test_no_absolute_path_remains(
    root: str, person: str, folders: list[str], files: list[str], elsewhere: list[str]
) -> None:
    """Whatever the folders are called: no path and no home folder of the original is in any text of the copy."""
    folder = "/".join([root, person, *folders])
    other = "/" + "/".join(["opt", *elsewhere])
    paths = [*(f"{folder}/{file}.py" for file in files), f"{other}/site-packages/torch/x.py"]
    manifest = Manifest(
        command=(f"{other}/bin/python", paths[0], f"--data={folder}/data", "--out", f"{other}/out"),
        target=paths[0],
        notes=(f"wrote {folder}/log.txt and {other}/log.txt", f"({other}/x)"),
        capture=Capture(False, reason=f"see '{folder}/core'"),
        plan={"swap": {"folder": f"{other}/swap"}},
    )
    stack = "\n".join(f"{path}:{line}:run" for line, path in enumerate(paths, 1))
    clean = texts_of(scrubbed(trace_of(manifest, stack)))
    for path in (*paths, folder, other, f"{root}/{person}"):
        assert path not in clean
    if root in ("/home", "/Users", "/mnt/home"):
        assert person not in clean


def test_phases_keep_the_recorders_names() -> None:
    """Whoever is called loading; names that the job gives lose what is a person's."""
    trace = make_trace([[Op(phase="loading"), Op(phase="rollout of alice")]], [Storage("a", 4)])
    ops = scrubbed(trace, ["alice", "loading"]).table(Ops)
    assert ops.phase[0] == "loading"
    assert ops.phase[1].startswith("rollout of ")
    assert "alice" not in ops.phase[1]
