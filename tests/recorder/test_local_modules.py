"""The modules that the variables of a compiled function hold are read without a trace."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
from torch import nn

from memprof.recorder.compiled.provenance import LocalModules


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
