"""A recording of a compiled job shows which modules and lines the buffers inside belong to, as a dry run does."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch
from memprof.policies.swap.policy import Swap
from memprof.recorder.compiled.generated_modules import GraphCache
from memprof.recorder.compiled.generated_operators import cpp_kernels
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from tests.recorder.recorded import Ended, record_script

#: Whether inductor caches graphs is read when it is imported.
_cold = pytest.mark.cold

_needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
_JOB = """
import os
import torch
from torch import nn
{setup}
torch.manual_seed(0)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 32, bias={bias}), nn.Linear(32, 16, bias={bias})
    def forward(self, x):
        hidden = self.one(x)
        {between}
        return self.two({activation})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Model()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = compiled(torch.randn(64, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
#: After the window, the functions of generated code are torch's own again.
_SHOWS_FUNCTIONS = """
from torch._inductor.codecache import PyCodeCache
scopes = [vars(module) for module in PyCodeCache.modules]
print({type(scope["empty_strided_cpu"]).__name__ for scope in scopes if "empty_strided_cpu" in scope})
"""


def _record(folder: Path, *options: str, setup: str = "", between: str = "pass", name: str = "run") -> Ended:
    script = _JOB.format(setup=setup, between=between, bias=True, activation="hidden.exp()") + _SHOWS_FUNCTIONS
    return record_script(folder, script, "--steps", "2", *options, name=f"{name}.memprof")


def _alive_at_peak(step: Step) -> Counter[tuple[str, str, str]]:
    """Returns the bytes alive at the peak by module, innermost line of the job's and category."""
    storages = step.storages
    op = int(step.memory.op_id[np.argmax(step.memory.allocated_bytes)])
    alive = (storages.created_op_id <= op) & ((storages.freed_op_id == NONE) | (storages.freed_op_id > op))
    found: Counter[tuple[str, str, str]] = Counter()
    for row in np.flatnonzero(alive):
        module, created = storages.module_id[row], storages.created_op_id[row]
        stack = step.ops.stack_id[created] if created != NONE else NONE
        line = re.search(r"job\.py:(\d+)", str(step.stacks.frames[stack])) if stack != NONE else None
        name = str(step.modules.name[module]) if module != NONE else ""
        found[name, line[1] if line else "", str(storages.category[row])] += int(storages.allocated_bytes[row])
    return found


def _compiled_notes(ended: Ended) -> list[str]:
    return [note for note in ended.trace.manifest.notes if note.startswith("torch.compile")]


def test_buffers_of_products_have_the_modules_and_lines_of_the_dry_run(tmp_path: Path) -> None:
    """Generated code without kernels of its own needs no C++ compiler."""
    script = _JOB.format(setup="", between="pass", bias=False, activation="hidden")
    real = record_script(tmp_path, script, "--steps", "2", name="real.memprof")
    dry = record_script(tmp_path, script, "--dry-run", "--skip", "2", name="dry.memprof")
    assert not _compiled_notes(real)
    alive = _alive_at_peak(real.step)
    assert alive == _alive_at_peak(dry.step)
    assert ("_orig_mod.layers.1.one", "12", "activation") in alive


@_cold
def test_operators_that_inductor_itself_runs_are_recorded(tmp_path: Path) -> None:
    """Its modules hold the recorder's functions, but are no generated code."""
    script = _JOB.format(
        setup="import torch._inductor.codecache as cache; exec('def part(x): return x.frac()', vars(cache))",
        between="pass",
        bias=False,
        activation="hidden",
    )
    ended = record_script(
        tmp_path, script.replace("loss.backward()", "loss.backward(); cache.part(loss.detach())"), "--steps", "2"
    )
    assert ended.returncode == 0
    assert "aten.frac.default" in ended.step.ops.name


@_needs_compiler
@pytest.mark.parametrize("between", ["pass", "torch._dynamo.graph_break()"], ids=["whole", "broken"])
@pytest.mark.slow
def test_a_recording_shows_the_modules_and_lines_that_its_dry_run_shows(tmp_path: Path, between: str) -> None:
    """Peak, category, module and line of every byte; with a break in each layer, all layers run one compiled graph."""
    real = _record(tmp_path, between=between, name="real")
    dry = _record(tmp_path, "--dry-run", "--skip", "2", between=between, name="dry")
    assert real.trace.step_peaks().items() & dry.trace.step_peaks().items()
    alive = _alive_at_peak(real.step)
    assert alive == _alive_at_peak(dry.step)
    saved = {name.removesuffix(".one") for name, _, kind in alive if kind == "activation"}
    assert saved >= {"_orig_mod.layers.0", "_orig_mod.layers.1"}
    for table in ("name", "phase", "module_id", "forward_op_id"):
        inside = [np.char.startswith(ended.step.ops.name.astype(str), "inductor.") for ended in (real, dry)]
        ours, theirs = (getattr(ended.step.ops, table)[rows] for ended, rows in zip((real, dry), inside, strict=True))
        if table != "forward_op_id":
            assert ours.tolist() == theirs.tolist()
        assert len(ours)
    assert not _compiled_notes(real)
    assert real.stdout.splitlines()[-1] == "{'builtin_function_or_method'}"
    assert find_batch(real.step).size == find_batch(dry.step).size == 64
    with pytest.raises(PolicyError, match=r"torch\.compile generates"):
        Swap(to="disk").transform(real.step)


@_cold
@_needs_compiler
@pytest.mark.slow
def test_recording_changes_no_loss(tmp_path: Path) -> None:
    """Recorded steps compute what steps without the recorder do."""
    recorded = _record(tmp_path, "--skip", "0", "--steps", "5").stdout
    skipped = _record(tmp_path, "--skip", "4", "--steps", "1").stdout
    assert recorded == skipped


@_cold
@_needs_compiler
@pytest.mark.slow
def test_graphs_that_inductor_has_in_its_cache_are_lowered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a second run shows the modules and lines inside as well."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/cache")
    first = _record(tmp_path, setup='os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"', name="first")
    assert list((tmp_path / "cache" / "fxgraph").iterdir())
    again = _record(tmp_path, name="again")
    assert not _compiled_notes(again)
    assert again.stdout.splitlines()[:5] == first.stdout.splitlines()[:5]
    inside = {name for name, _, kind in _alive_at_peak(again.step) if kind == "activation"}
    assert inside >= {"_orig_mod.layers.0.two", "_orig_mod.layers.1.one"}


@_cold
@_needs_compiler
@pytest.mark.slow
def test_a_job_can_save_what_was_compiled_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are written into the cache, though none is read."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/cache")
    script = _JOB.format(setup="", between="pass", bias=True, activation="hidden.exp()") + (
        "artifacts, saved = torch.compiler.save_cache_artifacts()\nprint(sorted(saved.artifacts))\n"
    )
    done = record_script(tmp_path, script, "--steps", "2")
    assert done.stdout.splitlines()[-1] == "['aot_autograd', 'inductor']"


def test_the_tag_of_cached_graphs_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what the job had set before, unless it has set another since or the environment says what is cached."""
    from torch.compiler import config

    for variable in ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(config, "cache_key_tag", "mine")
    cache = GraphCache()
    cache.set_aside()
    tags = ["mine", config.cache_key_tag]
    cache.renew()
    assert len({*tags, config.cache_key_tag}) == 3
    cache.restore()
    assert config.cache_key_tag == "mine"
    cache.set_aside()
    config.cache_key_tag = "later"
    cache.renew()
    cache.restore()
    assert config.cache_key_tag == "later"
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    cache.set_aside()
    assert config.cache_key_tag == "later"


@_cold
@_needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ('os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"', "loaded from inductor's cache"),
        ("import torch._inductor.config; torch._inductor.config.cpp_wrapper = True", "generated C++ (cpp_wrapper)"),
        (
            (
                "from torch._inductor.graph import GraphLowering as Graph\n"
                "lower = Graph._compile_to_module\n"
                "def forget(graph):\n"
                "    made = lower(graph)\n"
                "    del graph.name_to_buffer\n"
                "    return made\n"
                "Graph._compile_to_module = forget"
            ),
            "unknown with torch",
        ),
    ],
    ids=["cache", "C++", "no buffers"],
)
def test_what_is_unknown_is_recorded_as_a_whole_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, reason: str
) -> None:
    """To the same peak, and the same losses."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/cache")
    known = _record(tmp_path, name="known")
    if "CACHE" in setup:
        _record(tmp_path, setup=setup)  # fills the cache
    ended = _record(tmp_path, setup=setup)
    (note,) = _compiled_notes(ended)
    assert reason in note
    assert ended.trace.step_peaks() == known.trace.step_peaks()
    assert ended.stdout.splitlines()[:5] == known.stdout.splitlines()[:5]
    inside = {name for name, _, kind in _alive_at_peak(ended.step) if kind == "activation"}
    assert inside <= {"", "_orig_mod"}


def test_kernels_are_read_from_generated_code() -> None:
    """Their names, and which of their arguments they write to."""
    source = (
        "cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r'''\n'''\n"
        "cpp_fused_mul_1 = async_compile.cpp(['float*', 'float*'], '''''')\n"
        "triton_poi_2 = async_compile.triton('triton_poi_2', '''''')\n"
    )
    assert list(cpp_kernels(source)) == [("cpp_fused_add_0", ({1}, set())), ("cpp_fused_mul_1", ({0, 1}, set()))]


_COMPILED_UPDATE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
update = torch.compile(optimizer.step, backend="eager")
for step in range(6):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    update()
    optimizer.zero_grad()
    print(loss.item())
"""


_TWO_STEPS = ("--skip", "1", "--steps", "2")


@pytest.mark.parametrize(
    ("backend", "words"),
    [("eager", _TWO_STEPS), ("aot_eager", _TWO_STEPS), ("eager", ("--light",))],
    ids=["window", "graphs", "light"],
)
def test_a_step_does_not_end_within_a_compiled_update(tmp_path: Path, backend: str, words: tuple[str, ...]) -> None:
    """Torch restores dispatch keys after a compiled call: without the recorder's mode, these would end the job.

    The graphs that are called in it are modules, but none of the job's.
    """
    ended = record_script(tmp_path, _COMPILED_UPDATE.replace("eager", backend), *words)
    assert ended.returncode == 0, ended.stderr
    assert len(set(ended.stdout.split())) == 6
    if words == ("--light",):
        return
    recorded = ended.trace
    assert recorded.recorded_steps == (1, 2)
    phases = [set(recorded.step(number).ops.phase) for number in recorded.recorded_steps]
    assert all({"forward", "backward"} <= some for some in phases)
