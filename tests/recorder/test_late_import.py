"""A module is noticed when the job imports it, without being imported, wrapped or visible to the job before."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from memprof.recorder.compiled.late_import import LateImport


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that can be imported, of two modules and one that fails."""
    folder = tmp_path / "late_package"
    folder.mkdir()
    for name in ("__init__", "one", "two"):
        (folder / f"{name}.py").write_text(f"name = {name!r}")
    (folder / "fails.py").write_text("import sys\nframes = sys._getframe()\nraise ValueError('fails')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("late_package")]:
        del sys.modules[name]


def test_the_function_is_called_once_the_module_is_whole(package: Path) -> None:
    """The others are imported as ever, and Python's finder and specs are of their own types afterwards."""
    seen: list[tuple[ModuleType, str]] = []
    waiting = LateImport(package, {"late_package.one": lambda module: seen.append((module, module.name))})
    assert waiting.install()
    import late_package.two

    assert not seen
    import late_package.one

    assert seen == [(late_package.one, "one")]
    assert type(late_package.one.__spec__) is type(late_package.two.__spec__) is ModuleSpec
    waiting.remove()
    assert type(pkgutil.get_importer(str(package))) is FileFinder


def test_a_module_that_is_there_already_is_handed_over_at_once(package: Path) -> None:
    """No finder is changed then."""
    import late_package.one

    seen: list[ModuleType] = []
    assert LateImport(package, {"late_package.one": seen.append}).install()
    assert seen == [late_package.one]
    assert type(pkgutil.get_importer(str(package))) is FileFinder


def test_an_import_that_fails_is_the_jobs_own_affair(package: Path) -> None:
    """Its traceback has no frame of memprof's, and the function is not called."""
    seen: list[ModuleType] = []
    waiting = LateImport(package, {"late_package.fails": seen.append})
    assert waiting.install()
    with pytest.raises(ValueError, match="fails") as raised:
        import late_package.fails  # noqa: F401 - it raises
    frames = [str(entry.path) for entry in raised.traceback]
    assert not [path for path in frames if "late_import.py" in path and "test_" not in path]
    assert not seen
    waiting.remove()


def test_nothing_is_waited_for_where_another_finder_imports_the_package(package: Path) -> None:
    """A finder of the job's own is left alone."""

    class OtherFinder(FileFinder):
        """The job's."""

    sys.path_importer_cache[str(package)] = OtherFinder(str(package))
    waiting = LateImport(package, {"late_package.one": lambda _: None})
    assert not waiting.install()
    waiting.remove()
    assert type(sys.path_importer_cache[str(package)]) is OtherFinder
