"""The names of ``torch.cuda`` and ``torch._C`` that CUDA builds of torch have, on the device of a dry run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.replay.allocator.rules import settings_from_options
from memprof.virtual.device.memory import VirtualMemory
from memprof.virtual.device.native import names
from tests.recorder.recorded import record_script

_STUB = Path(torch.__file__).parent / "_C" / "__init__.pyi"
#: What a parameter of a type is given.
_VALUES = {"_int": 0, "int": 0, "_bool": False, "_float": 0.5, "str": "", "str | None": None, "_int | str": 0}
#: Arguments of functions that reject those.
_ACCEPTED = {"_cuda_record_memory_history": ["all", "all", "python", 8]}
#: Classes whose parameters torch's Python code does not declare.
_UNDECLARED = "class (*args, **kwargs)"

_SCRIPT = """
import json, sys
import torch
sys.path.insert(0, {folder!r})
from shapes import shape_of
calls = json.loads({calls!r})
found = {{"public": {{}}, "native": {{}}}}
for name in json.loads({public!r}):
    found["public"][name] = shape_of(name)
for name, arguments in calls.items():
    function = getattr(torch._C, name, None)
    try:
        found["native"][name] = "missing" if function is None else f"answers {{function(*arguments)!r}}"[:100]
    except Exception as error:
        found["native"][name] = f"{{type(error).__name__}}: {{error}}"
print("FOUND", json.dumps(found))
torch.ones(3, device="cuda")
"""

_SHAPES = '''
import importlib, inspect


def shape_of(name):
    """Returns what a name is: a class with its public attributes, or a function; and its signature.

    Python 3.14 evaluates annotations when they are read: they may name a stand-in.
    """
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    if not inspect.isclass(value):
        signature = inspect.signature(value)
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        return ["function", str(signature.replace(parameters=plain, return_annotation=signature.empty)), []]
    members = sorted({each for kind in value.__mro__[:-1] for each in vars(kind) if not each.startswith("_")})
    return ["class", "", members]
'''


def is_in(entry: list[str]) -> bool:
    """Whether a name is in the installed torch's version."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    first, last = (tuple(map(int, text.split("."))) if text else () for text in entry[1:])
    return first <= version and (not last or version <= last)


def arguments_by_name() -> dict[str, list[Any]]:
    """Returns arguments for each function of the stub of the installed torch's C++ side."""
    found = {}
    for node in ast.parse(_STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names()["native"]:
            kinds = [ast.unparse(arg.annotation) if arg.annotation else "Any" for arg in node.args.args]
            needed = kinds[: len(kinds) - len(node.args.defaults)]
            found[node.name] = _ACCEPTED.get(node.name, [_VALUES.get(kind) for kind in needed])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a dry run finds of each name, in a process of its own."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "shapes.py").write_text(_SHAPES)
    public = [name for name, entry in names()["public"].items() if is_in(entry)]
    script = _SCRIPT.format(folder=str(folder), calls=json.dumps(arguments_by_name()), public=json.dumps(public))
    ended = record_script(folder, script, "--dry-run", "--device", "h100-80g")
    (line,) = [text for text in ended.stdout.splitlines() if text.startswith("FOUND ")]
    answer: dict[str, dict[str, Any]] = json.loads(line.partition(" ")[2])
    return answer


def test_every_public_name_is_of_its_kind(found: dict[str, dict[str, Any]]) -> None:
    """Classes stay classes with their attributes, functions keep their signatures."""
    namespace: dict[str, Any] = {"importlib": importlib, "inspect": inspect}
    exec(_SHAPES, namespace)
    assert len(found["public"]) > 100
    for name, (kind, signature, members) in found["public"].items():
        plain_kind, plain_signature, plain_members = namespace["shape_of"](name)
        assert kind == plain_kind, name
        assert signature == plain_signature, name
        assert set(plain_members) <= set(members), name


def test_every_native_function_answers_or_refuses(found: dict[str, dict[str, Any]]) -> None:
    """A refusal names the function and what to do instead."""
    assert len(found["native"]) > 70
    refusals = {}
    for name, what in found["native"].items():
        if not what.startswith("answers"):
            assert "a real one. Dry-run the job without" in what, (name, what)
            assert f"torch._C.{name}" in what
            refusals[name] = what
    assert len(refusals) < len(found["native"]) / 2, sorted(refusals)


def test_the_list_is_that_of_the_installed_torch() -> None:
    """Every ``_cuda_`` function in the stub of a version that the list covers is in it."""
    version = torch.__version__.split("+")[0].rpartition(".")[0]
    if version not in [each.rpartition(".")[0] for each in names()["versions"]]:
        pytest.skip(f"the list does not cover torch {version}")
    tree = ast.parse(_STUB.read_text()).body
    stub = {node.name for node in tree if isinstance(node, ast.FunctionDef) and node.name.startswith("_cuda_")}
    assert stub <= {name for name, entry in names()["native"].items() if is_in(entry)}


def test_a_reset_peak_counts_no_released_segment() -> None:
    """``empty_cache`` and then ``reset_peak_memory_stats``: the peaks begin at what is reserved now."""
    memory = VirtualMemory(settings_from_options({}, capacity_bytes=1 << 34))
    memory.give(memory.take(64 << 20))
    memory.empty_cache()
    memory.reset_peak()
    reserved = memory.stats()["reserved_bytes"]["all"]
    assert (reserved["current"], reserved["peak"]) == (0, 0)


_BUILD = """
import torch
from memprof.machines.card import find_card
from memprof.virtual.device import native
from memprof.virtual.device.memory import VirtualMemory
from memprof.replay.allocator.rules import settings_from_options

def of_the_driver(*_):
    raise RuntimeError("Found no NVIDIA driver on your system.")

torch._C._cuda_newer = torch.cuda.memory._bound = of_the_driver  # as in a CUDA build that is newer than the list
torch._C._cuda_attach_out_of_memory_observer = lambda observer: of_the_driver()
memory = VirtualMemory(settings_from_options({}, capacity_bytes=1 << 30))
native.install(find_card("rtx4090"), memory)
torch._C._cuda_attach_out_of_memory_observer(print)
assert memory.observers == [print]
for call in (torch._C._cuda_newer, torch.cuda.memory._bound):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


def test_what_a_cuda_build_has_besides_never_reaches_a_driver(tmp_path: Path) -> None:
    """Functions of a CUDA build that are in no list refuse as well, also where torch has imported them by name."""
    (tmp_path / "job.py").write_text(_BUILD)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot run torch._C._cuda_newer, which needs a real one") == 2
    assert "driver" not in done.stdout
