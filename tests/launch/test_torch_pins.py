"""What a dry run says about torch: the one it assumes, and how much others take that a project may ask for."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.allocator.uncertainty import change_between, describe_torch, versions_of
from memprof.launch.torch_versions import torch_pin
from memprof.machines.card import architecture_of
from memprof.trace.schema import Memory, Ops, Storages, Uses
from memprof.units import format_bytes_between
from tests.recorder.recorded import record

MIB = 1 << 20
#: fully_shard's copy of a unit's gradients into one buffer, in the type that they are reduced in.
_COPY = "fsdp.chunk_cat.default"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("requirements.txt", "# torch==1.9\nnumpy\ntorch==2.4.1+cu121 ; python_version > '3'\n", "torch==2.4.1+cu121"),
        ("requirements.txt", "torchvision==0.19\npytorch-lightning==2.0\n", ""),
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "torch >= 2.0, <2.5"]\n', "torch>=2.0,<2.5"),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^2.4"\n', "torch^2.4"),
        ("environment.yml", "dependencies:\n  - pytorch::pytorch=2.3\n  - pytorch-cuda=12.1\n", "torch=2.3"),
        ("uv.lock", '[[package]]\nname = "torch"\nversion = "2.6.0"\n', "torch==2.6.0"),
        ("setup.cfg", "[options]\ninstall_requires =\n    torch~=2.1\n", "torch~=2.1"),
    ],
)
def test_a_project_says_which_torch_it_needs(name: str, text: str, found: str, tmp_path: Path) -> None:
    """In the folder of the script or above it, up to the project's root; other packages' names are not mistaken."""
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_text("import torch\n")
    (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    assert torch_pin(("python", str(script))) == (found and f"{found} ({name})")


def test_a_scripts_own_header_comes_first_and_other_projects_do_not_count(tmp_path: Path) -> None:
    """PEP 723's header is the script's own; a file above the project's root is another's."""
    (tmp_path / "requirements.txt").write_text("torch==1.13\n")
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    script = root / "train.py"
    script.write_text("import torch\n")
    assert torch_pin((str(script),)) == ""
    (root / "requirements.txt").write_text("torch==2.0\n")
    script.write_text('# /// script\n# dependencies = [\n#   "torch==2.4",\n# ]\n# ///\nimport torch\n')
    assert torch_pin((str(script),)) == "torch==2.4 (train.py)"


def test_requirements_allow_versions() -> None:
    """The minor versions that a requirement allows, of those that a range is known for."""
    assert versions_of("torch==2.4.1+cu121") == ((2, 4),)
    assert versions_of("torch>=2.1,<2.4 (setup.cfg)") == ((2, 1), (2, 2), (2, 3))
    assert versions_of("torch~=2.3.0") == versions_of("torch=2.3") == ((2, 3),)
    assert versions_of("torch^2.14") == ((2, 14), (2, 15))
    assert versions_of("")[0] == (2, 0)


def test_other_versions_take_other_workspaces() -> None:
    """On a B200 each of two handles has 25,034,752 bytes less before 2.12, and up to 1 MiB of cuBLASLt's."""
    b200, rtx3090 = architecture_of("10.0"), architecture_of("8.6")
    assert b200 is not None
    assert rtx3090 is not None
    less, more = -2 * 25_034_752, -2 * 25_034_752 + 2 * MIB
    assert change_between(b200, (2, 13), (2, 4), 2, 0, 100) == (less, more, less - 1, more + 1)
    assert change_between(b200, (2, 13), (2, 15), 2, 0, 100) == (0, 0, 0, 0)
    assert change_between(b200, (2, 11), (2, 13), 2, 0, 0)[:2] == (-more, -less)
    assert change_between(rtx3090, (2, 13), (2, 11), 2, 0, 0)[:2] == (0, 2 * MIB)
    # torch 1.x keeps up to a fifth more, or 3 % less.
    assert change_between(rtx3090, (2, 13), (1, 13), 0, 100, 0)[:2] == (-3, 20)


_JOB = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
for _ in range(3):
    model(torch.randn(4, 1024, device="cuda")).sum().backward()
"""


def test_a_verdict_names_the_torch_it_assumes(tmp_path: Path) -> None:
    """On a B200 torch 2.4 takes 2 x 25,034,752 bytes less, or up to 2 MiB more than that."""
    (tmp_path / "job.py").write_text(_JOB)
    (tmp_path / "requirements.txt").write_text("torch==2.4\n")
    trace = record(tmp_path, "--dry-run", "--device", "b200", "job.py").trace
    assert trace.manifest.torch_pin == "torch==2.4 (requirements.txt)"
    text = describe_torch(trace)
    peak = int(trace.table(Memory).allocated_bytes.max()) - 2 * 25_034_752
    ranged = f"allocated {format_bytes_between(peak, peak + 2 * MIB)}, reserved "
    assert text.startswith(f"assumes torch 2.13.0; the project asks for torch==2.4 (requirements.txt): {ranged}")
    trace.manifest = dataclasses.replace(trace.manifest, torch_pin="torch==2.13.0")
    assert describe_torch(trace) == "assumes torch 2.13.0"


@pytest.mark.slow
def test_fully_shard_in_16_bits_takes_more_from_2_15_on_where_it_chooses_no_type(tmp_path: Path) -> None:
    """Without reduce_dtype, 2.15 reduces as 2.13 does with reduce_dtype=float32: the range holds that job's peak.

    A job that says float32 takes the same in all versions.
    """
    shutil.copytree(Path(__file__).parents[1] / "virtual" / "rank_jobs", tmp_path / "jobs")
    (tmp_path / "jobs" / "requirements.txt").write_text("torch==2.15\n")
    job = "jobs/fsdp.py"
    said, buffers = {}, {}
    for kind in ("short", "mixed"):
        made = record(tmp_path, "--dry-run", "--device", "rtx4090", "--ranks", "2", job, kind, name=f"{kind}.memprof")
        said[kind] = describe_torch(made.trace)
        peak = int(made.trace.table(Memory).allocated_bytes.max())
        ops, uses = made.trace.table(Ops), made.trace.table(Uses)
        copies = ops.op_id[ops.name == _COPY]
        written = uses.storage_id[np.isin(uses.op_id, copies) & (uses.role == "mutate")]
        buffers[kind] = int(made.trace.table(Storages).requested_bytes[written].max())
    assert buffers["mixed"] == 2 * buffers["short"]
    assert said["mixed"] == "assumes torch 2.13.0; the project asks for torch==2.15 (requirements.txt)"
    assert f"allocated {format_bytes_between(peak, peak + buffers['short'])}, reserved" in said["short"]
