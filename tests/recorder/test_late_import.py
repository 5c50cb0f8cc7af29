"""Modules that are imported, cast or compiled again late, and those in variables of compiled functions."""

from __future__ import annotations

import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from memprof.analysis.plans.predict import forecast
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.recorder.calls.modules import StoringObserver
from memprof.recorder.calls.tracebacks import recompiled
from memprof.recorder.compiled.late_import import LateImport
from memprof.recorder.compiled.provenance import LocalModules
from tests.recorder.recorded import record, record_script


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


_JOB = """
import torch
from torch import nn

encoder, model = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
with torch.no_grad():
    rows = encoder(torch.ones(2, 64))  # every module is seen here
model.to(torch.bfloat16)
model[0].requires_grad_(False)
for parameter in model[1].parameters():
    parameter.data = parameter.data.float()  # as training scripts of diffusers cast what they train
optimizer = torch.optim.AdamW(model[1].parameters())
for step in range(8):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("options", [(), ("--light",), ("--dry-run",)])
def test_modules_have_the_bytes_that_they_train_with(options: tuple[str, ...], tmp_path: Path) -> None:
    """Weights of the first layer take 2 bytes an element, those of the second 4."""
    modules = record_script(tmp_path, _JOB, *options).step.modules
    by_name = dict(zip(modules.name.tolist(), modules.parameter_bytes.tolist(), strict=True))
    assert by_name["Sequential.0"] == 2 * (64 * 64 + 64)
    assert by_name["Sequential.1"] == 4 * (64 * 64 + 64)


def test_its_plan_is_made_for_it(tmp_path: Path) -> None:
    """A plan from the recording is applied, not refused as one for another model."""
    plan = Plan((Checkpoint(modules=("1",)),))
    write_plan(tmp_path / "plan.toml", forecast(record_script(tmp_path, _JOB).trace, plan).plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert under.returncode == 0, under.stderr
    assert "exact" in under.stderr


class Held:
    """Something a variable held."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, nn.Module]]:
    """What is found in the functions below, which call a graph as TorchDynamo's functions do."""
    results: list[dict[str, nn.Module]] = []

    def graph() -> None:
        results.append(LocalModules().find(sys._getframe(), ["layer", "x", "missing"]))

    monkeypatch.setitem(globals(), "__compiled_fn_1", graph)
    return results


def _is_freed(layer: nn.Module, x: Any) -> bool:
    layer.training = True
    held = weakref.ref(x)
    __compiled_fn_1()  # type: ignore[name-defined]  # noqa: F821 - set by the fixture
    del x
    return held() is None


def _run_reading(layer: nn.Module) -> dict[str, Any]:
    variables = locals()
    __compiled_fn_1()  # type: ignore[name-defined]  # noqa: F821
    return variables


def test_modules_are_found_and_no_variable_is_kept_alive(found: list[dict[str, nn.Module]]) -> None:
    """What the function deletes afterwards is freed at once; other values and missing names are left out."""
    layer = nn.Identity()
    is_freed = _is_freed(layer, Held())  # in an assertion, pytest would keep the value
    assert is_freed
    assert found == [{"layer": layer}]


def test_the_jobs_own_dictionary_of_variables_stays_whole(found: list[dict[str, nn.Module]]) -> None:
    """Before Python 3.13 it is the very dictionary that reading a frame fills, so such functions are not read."""
    layer = nn.Identity()
    assert _run_reading(layer)["layer"] is layer
    assert found == [{} if sys.version_info < (3, 13) else {"layer": layer}]


def test_nothing_is_read_where_no_function_runs_compiled_code() -> None:
    """Its frames have variables of the same names."""
    layer = nn.Identity()
    assert layer is not None
    assert LocalModules().find(sys._getframe(), ["layer"]) == {}


def test_the_variables_of_a_module_are_left_alone(found: list[dict[str, nn.Module]]) -> None:
    """They are its globals, not a copy."""
    scope: dict[str, Any] = {"layer": nn.Identity(), "__compiled_fn_1": globals()["__compiled_fn_1"]}
    exec("__compiled_fn_1()", scope)
    assert "layer" in scope
    assert found == [{}]


def doubled(value: int, change: Callable[[int], int] = lambda one: one + 1) -> int:
    """Returns twice what a default makes of a value; the default has code of its own."""
    return 2 * change(value)


def test_the_code_is_that_of_the_function() -> None:
    """Also where the module's code has another's in front of it: that of a default, or of annotations."""
    code = recompiled(doubled, lambda definition: None)
    assert code.co_name == "doubled"
    assert code.co_consts == doubled.__code__.co_consts
    assert (code.co_firstlineno, list(code.co_positions())) == (
        doubled.__code__.co_firstlineno,
        list(doubled.__code__.co_positions()),
    )


class Stored:
    """Notes each call that saves or loads."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def begin(self, phase: int) -> int:
        self.seen.append(phase)
        return phase

    def end(self, token: int, error: BaseException | None) -> None:
        self.seen.append(error)


def test_a_compiled_function_that_saves_is_not_observed() -> None:
    """While it is traced, what torch.compile meets is torch's own code; outside, the call is noted."""
    stored, model = Stored(), torch.nn.Linear(4, 4)
    observer = StoringObserver(stored.begin, stored.end)

    @torch.compile(backend="eager", fullgraph=True)
    def weight() -> torch.Tensor:
        kept: torch.Tensor = model.state_dict()["weight"]
        return kept * 2

    observer.install()
    try:
        assert torch.equal(weight(), model.weight * 2)
        assert stored.seen == []
        model.state_dict()
        assert len(stored.seen) == 2
    finally:
        observer.remove()
