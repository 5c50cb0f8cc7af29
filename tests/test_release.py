"""What is uploaded: two builds are equal, the checkers of the index find nothing, the workflow's actions are pinned."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from memprof.version import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _build(source: Path, output: Path) -> dict[str, bytes]:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    output = tmp_path_factory.mktemp("dist")
    _build(ROOT, output)
    return output


@pytest.mark.slow
def test_two_builds_are_equal(dist: Path, tmp_path: Path) -> None:
    """A copy elsewhere, with other times, builds the same wheel and the same sdist, byte for byte."""
    copied = tmp_path / "elsewhere"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():  # not a link to a folder
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copied / name)
            (copied / name).chmod((ROOT / name).stat().st_mode)
    assert _build(copied, tmp_path / "dist") == {path.name: path.read_bytes() for path in dist.iterdir()}


@pytest.mark.slow
def test_the_wheel_has_the_skill(dist: Path) -> None:
    """Installed, SKILL.md is next to the package's modules: files("memprof") / "SKILL.md"."""
    (wheel,) = dist.glob("*.whl")
    assert zipfile.ZipFile(wheel).read("memprof/SKILL.md") == (ROOT / "SKILL.md").read_bytes()


def test_the_description_on_the_index_has_addresses() -> None:
    """A release built on GitHub links README.md's pages and pictures absolutely; each is a file of the repository."""
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    text = hook["with_addresses"]((ROOT / "README.md").read_text(), "owner/memprof", "v1.0.0")
    targets = re.findall(r"""(?:\]\(|src="|srcset=")([^)"\s]+)""", text)
    assert "https://raw.githubusercontent.com/owner/memprof/v1.0.0/docs/assets/pictures/report.svg" in targets
    assert "https://github.com/owner/memprof/blob/v1.0.0/docs/gpu.md#figures" in targets
    for target in targets:
        path = re.fullmatch(r"https://[^/]+/owner/memprof/(?:blob/)?v1\.0\.0/([^#]+)(?:#.*)?", target)
        assert path, target
        assert (ROOT / path[1]).is_file(), target


@pytest.mark.slow
def test_checkers_accept_the_files(dist: Path) -> None:
    """`twine check --strict` and `check-wheel-contents` find nothing."""
    pytest.importorskip("twine", reason="twine is not installed")
    pytest.importorskip("check_wheel_contents", reason="check-wheel-contents is not installed")
    files = [str(path) for path in dist.iterdir()]
    wheels = [name for name in files if name.endswith(".whl")]
    for words in (["twine", "check", "--strict", *files], ["check_wheel_contents", *wheels]):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_bill_of_materials_names_the_dependencies(tmp_path: Path) -> None:
    """CycloneDX's list of this environment has every package installed in it, with its version."""
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed")
    output = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", sys.prefix, "--of", "JSON", "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    listed = {(part["name"], part["version"]) for part in json.loads(output.read_text())["components"]}
    installed = {(one.name, one.version) for one in distributions(path=[sysconfig.get_path("purelib")])}
    assert listed >= installed - {("torch-memprof", __version__)}


def test_an_audit_fails_for_a_vulnerability_alone() -> None:
    """Packages that the index has no advisories on are named, and do not fail; a vulnerable version does."""
    audit = runpy.run_path(str(ROOT / "packaging" / "audit.py"))
    clean = {"name": "click", "version": "8.4.0", "vulns": []}
    unknown = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": ""}
    text, is_vulnerable = audit["describe"]([clean, unknown])
    assert not is_vulnerable
    assert text.splitlines() == [
        "1 of 2 pinned packages audited, 0 known vulnerabilities.",
        "Not audited, since the index has no advisories on them: torch.",
    ]
    text, is_vulnerable = audit["describe"]([clean | {"vulns": [flaw]}, unknown])
    assert is_vulnerable
    assert text.startswith("click 8.4.0: PYSEC-1, fixed in 2.0\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path: Path) -> None:
    """Third-party actions are pinned to a full commit hash, since tags can move; a comment gives the version."""
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for name, version in used:
        assert name == "./" or re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name), name
        assert name == "./" or re.fullmatch(r" # v\d+(\.\d+)+", version), name
