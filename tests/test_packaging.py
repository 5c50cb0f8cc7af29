"""What is published: the wheel's content, its metadata, and how light the package is to import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import memprof
from memprof import errors
from memprof.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Builds the wheel from the checkout."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """Reads the wheel's metadata."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def _distribution(requirement: str) -> str:
    """Takes the normalised name off a requirement such as ``import-linter>=2.5``."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]).lower()


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Installing gives `memprof` and `memprof_dashboard`, typed, and no tests, samples or folder named dashboard."""
    names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    own = f"torch_memprof-{memprof.__version__}"
    assert tops == {"memprof", "memprof_dashboard", f"{own}.dist-info", f"{own}.data"}
    assert {
        "memprof/py.typed",
        "memprof/schemas/report.json",
        "memprof_dashboard/py.typed",
        "memprof_dashboard/app.py",
        "memprof_dashboard/assets/memprof.css",
        "memprof_dashboard/export_page/export.html",
        "memprof_dashboard/export_page/plotly.js.gz",
        "memprof_dashboard/export_page/plotly.LICENSE.txt",
    } <= set(names)
    assert not [name for name in names if name.endswith((".pyc", ".memprof"))]


def test_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    """No source file is missing, the bootstrap's `sitecustomize.py` included."""
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "memprof").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    assert "memprof/launch/bootstrap/sitecustomize.py" in modules
    assert "memprof/recorder/profiler/listener.cpp" in wheel.namelist()


def test_wheel_holds_the_manual_pages(wheel: zipfile.ZipFile) -> None:
    """Where `man` looks next to a bin folder; one for each verb, and no other file."""
    beside = f"torch_memprof-{memprof.__version__}.data/"
    pages = {name.removeprefix(beside) for name in wheel.namelist() if name.startswith(beside)}
    assert pages == {"data/share/man/man1/memprof.1", *(f"data/share/man/man1/memprof-{verb}.1" for verb in VERBS)}


def test_wheel_carries_the_licence(wheel: zipfile.ZipFile, metadata: Message) -> None:
    """The whole text of Apache-2.0 goes with it."""
    (name,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    text = wheel.read(name).decode()
    assert "Apache License\n                           Version 2.0" in text
    assert "Copyright 2026 the memprof authors" in text
    assert metadata["License-Expression"] == "Apache-2.0 AND BSD-3-Clause AND ISC AND MIT AND Zlib"


def test_metadata_says_what_is_needed(metadata: Message) -> None:
    """The base install needs no torch and no dash; those come with their extras."""
    assert (metadata["Name"], metadata["Version"]) == ("torch-memprof", memprof.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    needed = metadata.get_all("Requires-Dist", [])
    assert {_distribution(line) for line in needed if "extra ==" not in line} == {
        "click", "numpy", "pandas", "psutil", "pyarrow", "rich", "scipy", "tomlkit",
    }  # fmt: skip
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "torch", "dashboard", "remote", "mcp", "compare", "all", "dev", "docs", "extras", "integrations",
        "libraries", "cudnn",
    }  # fmt: skip
    assert [_distribution(line) for line in needed if "extra == 'torch'" in line] == ["torch"]
    assert [_distribution(line) for line in needed if "extra == 'dashboard'" in line] == ["dash", "plotly"]


def test_conda_recipe_has_the_same_dependencies() -> None:
    """The recipe asks for what pyproject.toml asks for, and has the version of the package."""
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    block = recipe.partition("  run:\n")[2].partition("  run_constraints:")[0]
    listed = {line.strip("- ").replace(" ", "") for line in block.strip().splitlines()}
    assert listed == {*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"}
    assert f'version: "{memprof.__version__}"' in recipe


def test_every_dependency_is_pinned() -> None:
    """`make` gives every developer the same versions: constraints.txt pins all that pyproject.toml asks for."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a line that pins nothing"
    extras = PROJECT["optional-dependencies"].values()
    asked = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    missing = {_distribution(line) for line in asked} - {_distribution(line) for line in lines} - {"torch-memprof"}
    assert not missing


def test_import_is_light() -> None:
    """`import memprof` imports nothing but the standard library, so that a script can have it at no cost."""
    code = (
        "import sys; before = set(sys.modules); import memprof; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    assert _python(code).split() == ["memprof"]


def test_record_is_imported_at_its_first_use() -> None:
    """`memprof.record` is the recorder of `launch.inline`, listed by `dir` before it is imported."""
    code = (
        "import sys, memprof; assert 'record' in dir(memprof); assert 'memprof.launch.inline' not in sys.modules; "
        "record = memprof.record; import memprof.launch.inline as inline; assert record is inline.record"
    )
    _python(code)


def test_unknown_names_are_refused() -> None:
    """An unknown name is an AttributeError with a message."""
    with pytest.raises(AttributeError, match="module 'memprof' has no attribute 'recrod'"):
        memprof.recrod  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.MemprofError, 1),
        (errors.InvariantError, 1),
        (errors.UsageError, 2),
        (errors.InconclusiveError, 3),
        (errors.GateFailedError, 4),
        (errors.BadInputError, 5),
    ],
)
def test_exit_codes(error: type[errors.MemprofError], exit_code: int) -> None:
    """Exit codes distinguish what went wrong, and one except clause catches every error of ours."""
    assert error.exit_code == exit_code
    assert issubclass(error, errors.MemprofError)
