"""Files written with --scrub contain no arguments of the job, people or hosts."""

from __future__ import annotations

import base64
import gzip
import json
import pickletools
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from memprof.cli.main import main
from memprof.trace.manifest import Capture, Machine, Manifest
from memprof.trace.schema import NONE, Optimizers, OutOfMemory
from memprof.trace.store import write_trace
from tests.building import Module, Op, Storage, Tables, make_tables

#: What the figures of a page show, compressed.
_FIGURES = re.compile('(?<=id="figures">)[^<]+')
_PACKED = re.compile(r"[A-Za-z0-9+/=]{10000,}")
#: What somebody typed, is called, or works on; none of it may be found again.
CANARIES = (
    *("SECRETK", "PATX", "dgx-07", "acme", "hunter2", "run_alyzce", "alyzce", "zcorp", "tigerproject", "wombatdata"),
    *("pozitional7", "walrus", "heron.json", "ottrel", "ferretkey", "mole", "stoat@", "lynx", "badger"),
)

FILE = "/scratch/walrus/tigerproject/run_alyzce.py"
STACK = f"""\
/scratch/walrus/tigerproject/badger/model_zcorp.py:7:forward_wombatdata
/scratch/walrus/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:1:forward
run_alyzce.py:9:main
{FILE}:12:train_step"""
COMMAND = (
    *("/scratch/walrus/venv/bin/python", "run_alyzce.py", "-k", "SECRETK", "--pat", "PATX", "pozitional7"),
    *("--h", "dgx-07.acme.internal", "--data=/mnt/zcorp/wombatdata", "--name", "run_alyzce", "-phunter2", "heron.json"),
    *("logger.ottrel=ferretkey", "MASTER_ADDR=dgx-07.acme.internal", "stoat@acme.com", '{"mole": "lynx"}'),
)


def tables() -> Tables:
    """A step whose tables contain arbitrary texts."""
    made = make_tables(
        [[Op("aten.mm.default", "forward", "fc", ["a"], stack=STACK), Op("aten.neg.default", frees=["a"])]] * 2,
        [Storage("a", 1 << 20, name="/home/alyzce/w", module="fc"), Storage("w", 1 << 20, "parameter", "fc.weight")],
        [Module("", "Net"), Module("fc", "Linear")],
    )
    made[Optimizers] = Optimizers.of(
        optimizer_id=[0],
        name=["run_alyzce.Adam"],
        settings=[json.dumps({"lr": 0.1, "name": "pozitional7 of alyzce"})],
        **{key: [1] for key in ("parameters", "parameter_bytes", "elements", "state_bytes", "full_state_bytes")},
    )
    sizes = ("requested", "allocated", "reserved", "largest_free", "free", "total")
    made[OutOfMemory] = OutOfMemory.of(
        time_us=[1.0],
        device=["cpu"],
        step=[1],
        op_id=[1],
        name=["aten.mm.default"],
        phase=["forward"],
        module_id=[NONE],
        stack_id=[0],
        **{f"{name}_bytes": [1 << 20] for name in sizes},
        is_caught=[True],
        message=["Cannot allocate memory for wombatdata on dgx-07, see /mnt/zcorp/heron.json"],
    )
    return made


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on two nodes, with every kind of private data."""
    path = tmp_path_factory.mktemp("tigerproject") / "run_alyzce.dgx-07.memprof"
    ranks = [
        Manifest(
            command=COMMAND,
            target="run_alyzce.py",
            rank=rank,
            world_size=2,
            node=f"dgx-0{7 + rank}.acme.internal",
            clock=f"dgx-0{7 + rank}",
            machine=Machine(os="Linux 6.8.0-zcorp", device_name="NVIDIA H100"),
            notes=("alyzce ran it on dgx-07.acme.internal for wombatdata, see /home/alyzce/x",),
            capture=Capture(False, "step 3, backward of fc", "dgx-08 lost /scratch/walrus/tigerproject (hunter2)"),
            plan={"swap": {"what": "activations", "folder": "/mnt/zcorp/swap"}},
        )
        for rank in (0, 1)
    ]
    write_trace(path, [(manifest, tables()) for manifest in ranks])
    return path


def everything_in(path: Path) -> str:
    """What is in a file, or in the files of a folder, without compression."""
    if path.is_dir():
        return "\n".join(f"{file.name}\n{everything_in(file)}" for file in sorted(path.rglob("*")) if file.is_file())
    data = path.read_bytes()
    if path.suffix == ".parquet":
        return str(pq.read_table(path).to_pylist())
    if path.suffix == ".pickle":
        return str([argument for _, argument, _ in pickletools.genops(data) if argument is not None])
    if path.suffix == ".html":
        return _FIGURES.sub(lambda found: gzip.decompress(base64.b64decode(found[0])).decode(), data.decode())
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


OUTPUTS = {
    "text": ["report", "RUN", "--scrub"],
    "stacks": ["report", "RUN", "--scrub", "--by", "stack"],
    "storages": ["report", "RUN", "--scrub", "--by", "storage"],
    "json": ["report", "RUN", "--scrub", "--json"],
    "ranks": ["report", "RUN", "--scrub", "--by", "rank"],
    "ranks.json": ["report", "RUN", "--scrub", "--by", "rank", "--json"],
    "allocator": ["report", "RUN", "--scrub", "--allocator"],
    "static": ["report", "RUN", "--scrub", "--static", "--json"],
    "page.html": ["report", "RUN", "--scrub", "--html", "OUT"],
    "summary.json": ["export", "RUN", "--to", "summary", "--scrub", "-o", "OUT"],
    "csv": ["export", "RUN", "--scrub", "--to", "csv", "-o", "OUT"],
    "parquet": ["export", "RUN", "--scrub", "--to", "parquet", "-o", "OUT"],
    "trace.json.gz": ["export", "RUN", "--scrub", "--to", "perfetto", "-o", "OUT"],
    "stacks.json": ["export", "RUN", "--scrub", "--to", "speedscope", "-o", "OUT"],
    "snapshot.pickle": ["export", "RUN", "--scrub", "--rank", "1", "--to", "snapshot", "-o", "OUT"],
}


def written(recording: Path, name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    out = tmp_path / name
    capsys.readouterr()
    assert main([{"RUN": str(recording), "OUT": str(out)}.get(word, word) for word in words]) == 0
    shown = capsys.readouterr().out
    # Letters of packed libraries, such as plotly's, spell anything.
    return _PACKED.sub("", everything_in(out) if "OUT" in words else shown)


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_canary_is_left(
    recording: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was typed, and of names of people, hosts, folders and projects, nothing is in the output."""
    monkeypatch.setenv("LOGNAME", "alyzce")  # who reads it is who made it, on another machine
    if name == "page.html":
        pytest.importorskip("plotly")
    text = written(recording, name, OUTPUTS[name], tmp_path, capsys)
    assert [canary for canary in CANARIES if canary in text] == []


@pytest.mark.parametrize("name", ["json", "csv", "page.html"])
def test_the_canaries_are_there_without_it(
    recording: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search finds them where nothing was taken out; modules and parameters are named either way."""
    if name == "page.html":
        pytest.importorskip("plotly")
    words = [word for word in OUTPUTS[name] if word != "--scrub"]
    assert "run_alyzce" in written(recording, name, words, tmp_path, capsys)
    assert "fc" in written(recording, f"scrubbed-{name}", OUTPUTS[name], tmp_path, capsys)


def test_the_nodes_of_ranks_stay_apart(recording: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Machines are numbered, so that the ranks that shared one can still be seen."""
    made = json.loads(written(recording, "ranks.json", OUTPUTS["ranks.json"], tmp_path, capsys))
    assert {one["node"] for one in made["ranks"]} == {"node 1", "node 2"}
