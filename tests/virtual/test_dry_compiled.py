"""A dry run of a compiled job allocates what the compiler's own code allocates, to the byte, and runs no kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from torch._functorch import config as tracing
from torch._inductor import config as inductor

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import suggest
from memprof.cli.pages.next_commands import next_commands
from memprof.errors import PolicyError
from memprof.planners.search.request import SearchRequest
from memprof.policies.accumulate.batch import find_batch
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.precision.policy import Precision
from memprof.policies.remat.policy import Remat
from memprof.policies.swap.policy import Swap
from memprof.recorder.compiled.generated_operators import cpp_kernels, kernel_access
from memprof.recorder.compiled.memory_settings import MemorySettings
from memprof.recorder.compiled.origins import made_by
from memprof.replay.live import live_bytes
from tests.recorder.recorded import Ended, record, record_script

_MODELS = Path(__file__).parents[2] / "lab" / "benchmarks" / "jobs" / "compiled.py"
_HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))
_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
{setup}
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    compiled(torch.randn(64, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_LAYERS = """
import torch
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        hidden = self.one(x)
        return self.two(hidden.exp())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Model()
for layer in model.layers:
    layer.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(64, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _dry_run(folder: Path, setup: str = "", *options: str) -> Ended:
    return record_script(folder, _JOB.format(setup=setup), "--dry-run", *options)


def _compiled_notes(ended: Ended) -> list[str]:
    return [note for note in ended.trace.manifest.notes if note.startswith("torch.compile")]


_EARLY = """
import torch
@torch.compile
def gated(x, y):
    return torch.nn.functional.gelu(x) * y + 3.25
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(8, 64))
    gated(hidden, hidden.sin()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def compiled_dry(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A dry run of a small compiled model."""
    return _dry_run(tmp_path_factory.mktemp("compiled"))


@pytest.mark.skipif(not _HAS_COMPILER, reason="no C++ compiler")
def test_a_function_compiled_before_the_first_model_has_its_buffers(tmp_path: Path) -> None:
    """Its kernels, compiled by torch itself, would read tensors that have no memory."""
    real, dry = record_script(tmp_path, _EARLY), record_script(tmp_path, _EARLY, "--dry-run")
    assert dry.peak == real.peak
    assert _compiled_notes(dry) == ["torch.compile: 2 graphs compiled as in a real run, up to the kernels"]


def test_buffers_are_those_of_the_generated_code(compiled_dry: Ended) -> None:
    """ReLU is computed in the memory of the product, where eager operators make two; the verdict says what ran."""
    ended, step = compiled_dry, compiled_dry.step
    hidden = step.storages.allocated_bytes == 64 * 32 * 4
    forward = step.ops.phase[np.maximum(step.storages.created_op_id, 0)] == "forward"
    assert int((hidden & forward).sum()) == 1
    (relu,) = np.flatnonzero([name.startswith("inductor.cpp_fused") and "relu" in name for name in step.ops.name])[:1]
    assert step.ops.mutates[relu]
    assert step.ops.written_bytes[relu] == 64 * 32 * 4
    assert step.modules.name[step.ops.module_id[relu]] == "_orig_mod.1"
    (kept,) = np.flatnonzero(hidden & forward)
    assert step.modules.name[step.storages.module_id[kept]] == "_orig_mod.0"
    assert step.modules.name[step.saved.module_id[step.saved.storage_id == kept]].tolist() == ["_orig_mod.0"]
    assert _compiled_notes(ended) == ["torch.compile: 2 graphs compiled as in a real run, up to the kernels"]
    assert _compiled_notes(ended)[0] in ended.stderr


@pytest.mark.parametrize(
    "policy",
    [Swap(to="disk"), Compress(), Checkpoint((".",)), Precision("bf16"), Remat(budget="1GiB")],
    ids=lambda policy: policy.name,
)
def test_policies_on_operators_of_generated_code_are_refused(compiled_dry: Ended, policy: Policy) -> None:
    """What they would do to operators that the compiler fuses is not predicted, and the sentence says what helps."""
    with pytest.raises(PolicyError, match=r"torch\.compile.*(--compile|--dry-run)"):
        policy.transform(compiled_dry.step)


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
def test_what_grows_with_the_batch_is_read_from_a_dry_run(tmp_path: Path, compiled_dry: Ended) -> None:
    """A real run that allocates in C++ hides the kernels of generated code, so its batch is unknown."""
    assert find_batch(compiled_dry.step).size == 64
    ended = record_script(
        tmp_path, _JOB.format(setup="import torch._inductor.config as config; config.cpp_wrapper = True")
    )
    with pytest.raises(PolicyError, match="record --dry-run"):
        find_batch(ended.step)
    found = suggest(ended.trace, basis_of(ended.trace), SearchRequest(1 << 10))
    with click.Context(click.Command("suggest"), obj=["suggest", "run.memprof", "--budget", "1024"]):
        commands = [command for command, _ in next_commands(found, None, None)]
    assert commands[0].endswith("--budget 1024 --compile")


def test_settings_of_the_compiler_that_change_memory_are_noted() -> None:
    """Those that a graph is compiled under and that are not torch's defaults, once; otherwise nothing is said."""
    settings = MemorySettings()
    settings.read()
    assert settings.sentences() == []
    with tracing.patch(activation_memory_budget=0.5), inductor.patch(reorder_for_peak_memory=False):
        settings.read()
        settings.read()
    settings.read()
    (note,) = settings.sentences()
    assert note == "torch.compile: compiled with activation_memory_budget=0.5, reorder_for_peak_memory=False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (
            "import torch._dynamo.convert_frame as frames\ndel frames.CatchErrorsWrapper",
            "and a real run differs: the compiler",
        ),
        (
            (
                "import torch._inductor.config as config\n"
                "def fail(graph): raise ValueError('no pass')\n"
                "config.post_grad_custom_pre_pass = fail"
            ),
            "since it did not compile in this dry run, and may in a real run: InductorError: ValueError: no pass",
        ),
    ],
    ids=["other torch", "compiler fails"],
)
def test_regions_that_cannot_be_compiled_here_run_eagerly_and_are_named(
    tmp_path: Path, setup: str, reason: str
) -> None:
    """The peak is that of the eager job, and the verdict says that a real run differs, or may."""
    eager = record_script(tmp_path, _JOB.replace("torch.compile(model)", "model").format(setup=""), "--dry-run")
    peak = eager.peak
    ended = _dry_run(tmp_path, setup)
    (note,) = _compiled_notes(ended)
    assert "ran eagerly" in note
    assert reason in note
    assert note in ended.stderr
    assert ended.peak == peak


@pytest.mark.slow
def test_layers_that_share_a_graph_have_their_own_modules_and_lines(tmp_path: Path) -> None:
    """Each layer is compiled on its own, and torch compiles one graph for both; backward runs it in reverse."""
    ended = record_script(tmp_path, _LAYERS, "--dry-run")
    step, lines = ended.step, _LAYERS.splitlines()
    activations = step.storages.take(
        (step.storages.category == "activation") & (step.storages.allocated_bytes == 64 * 32 * 4)
    )
    assert step.modules.name[activations.module_id].tolist() == ["layers.0.one", "layers.1.one"]
    kernels = np.flatnonzero([name.startswith("inductor.") for name in step.ops.name] & (step.ops.phase == "forward"))
    assert step.modules.name[step.ops.module_id[kernels]].tolist() == ["layers.0", "layers.1"]
    for ops, line in (activations.created_op_id, "hidden = self.one(x)"), (kernels, "return self.two(hidden.exp())"):
        stacks = step.stacks.frames[step.ops.stack_id[ops]]
        numbers = [int(re.findall(r"job\.py:(\d+):forward", stack)[0]) for stack in stacks]
        assert {lines[number - 1].strip() for number in numbers} == {line}
    (products,) = np.nonzero((step.ops.name == "aten.mm.out") & (step.ops.phase == "backward"))
    called = step.modules.name[step.ops.module_id[products]].tolist()
    assert [name.removeprefix("layers.")[0] for name in called] == sorted((name[7] for name in called), reverse=True)
    assert set(called) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("one", "two")}
    assert not [note for note in _compiled_notes(ended) if "unknown" in note]


@pytest.mark.slow
def test_modules_inside_are_unknown_where_inductor_keeps_no_buffers(tmp_path: Path) -> None:
    """The region is recorded as a whole then, to the same peak, and a note says so."""
    known = _dry_run(tmp_path)
    peak = known.peak
    setup = (
        "from torch._inductor.graph import GraphLowering as Graph\n"
        "lower = Graph.compile_to_module\n"
        "def forget(graph):\n"
        "    made = lower(graph)\n"
        "    del graph.name_to_buffer\n"
        "    return made\n"
        "Graph.compile_to_module = forget"
    )
    ended = _dry_run(tmp_path, setup)
    assert any("modules and lines inside 2 graphs are unknown with torch" in note for note in _compiled_notes(ended))
    assert ended.peak == peak
    assert not {"_orig_mod.0", "_orig_mod.1"} & set(ended.step.modules.name[ended.step.saved.module_id])


@pytest.mark.slow
def test_code_for_a_virtual_gpu_is_generated_without_triton(tmp_path: Path) -> None:
    """By the job's own call or by a plan; kernels, saved tensors and modules are those of generated code."""
    setup = "model.cuda(); torch.set_default_device('cuda')"
    ended = _dry_run(tmp_path, setup, "--device", "h100-80g")
    assert "2 graphs compiled as in a real run, up to the kernels, not compared with a run on a GPU" in ended.stderr
    assert np.char.startswith(ended.step.ops.name.astype(str), "inductor.triton_").any()
    assert {"_orig_mod.0", "_orig_mod.1"} & set(ended.step.modules.name[ended.step.saved.module_id])
    with pytest.raises(PolicyError, match=r"torch\.compile generates"):
        Swap().transform(ended.step)
    planned = record_script(
        tmp_path,
        _JOB.format(setup=setup).replace("torch.compile(model)", "model"),
        *("--dry-run", "--device", "h100-80g", "--skip", "2", "--compile", "."),
        name="planned.memprof",
    )
    assert planned.peak == ended.peak
    with_pools = _dry_run(tmp_path, setup + "\ntorch._inductor.config.triton.cudagraphs = True", "--device", "h100-80g")
    assert any("pools of CUDA graphs" in note for note in _compiled_notes(with_pools))


_FLEXIBLE = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
torch._dynamo.config.compiled_autograd = True  # compiles within what it compiles
length = 4096
project = torch.nn.Linear(64, 192).cuda()
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
optimizer = torch.optim.SGD(project.parameters())
def attend(inputs):
    query, key, value = project(inputs).view(1, 1, length, 192).chunk(3, -1)
    seen = torch.arange(2**17, device="cuda").remainder(50).eq(0).cumsum(0)  # scanned in parts, with scratch memory
    return flex_attention(query, key, value, block_mask=mask).square().mean() * seen[-1]
attend = torch.compile(attend)
for _ in range(3):
    attend(torch.randn(length, 64, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_flexible_attention_is_compiled_without_triton(tmp_path: Path) -> None:
    """Run eagerly, it would hold the scores: 4,096 x 4,096 float32 are 64 MiB."""
    ended = record_script(tmp_path, _FLEXIBLE, "--dry-run", "--device", "h100-80g")
    assert _compiled_notes(ended) == [
        "torch.compile: 2 graphs compiled as in a real run, up to the kernels, not compared with a run on a GPU"
    ]
    assert ended.step.storages.requested_bytes.max() <= 2**25  # cuBLAS's workspace


@pytest.mark.slow
def test_what_torch_fails_to_trace_for_a_virtual_gpu_runs_eagerly(tmp_path: Path) -> None:
    """Within a job that goes on; the verdict says why."""
    setup = (
        "model.cuda(); torch.set_default_device('cuda')\n"
        "from torch._dynamo.output_graph import OutputGraph\n"
        "def fails(*_, **__):\n"
        "    raise KeyError('an unknown operator')\n"
        "OutputGraph.compile_and_call_fx_graph = fails"
    )
    ended = _dry_run(tmp_path, setup, "--device", "h100-80g")
    assert ended.returncode == 0
    assert (
        "since it did not compile in this dry run, and may in a real run: InternalTorchDynamoError: KeyError"
        in ended.stderr
    )


_ATTENTION = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop, self.all, self.out = drop, nn.Linear(128, 384), nn.Linear(128, 128)
    def forward(self, x):
        query, key, value = self.all(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        kept = 1 - self.drop
        mask = (kept + torch.rand((len(x), 1, 1), device=x.device)).floor()
        return x + self.out(mixed.transpose(1, 2).flatten(2)) / kept * mask
model = nn.Sequential(Attention(0.1), Attention(0.2)).cuda()
model = torch.compile(model) if {compiles} else model
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(8, 256, 128, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_attention_and_autocast_are_traced_as_on_the_gpu(tmp_path: Path) -> None:
    """In one graph, whose attention is the kernel that the eager job runs, on tensors of autocast's type."""
    window = ("--dry-run", "--device", "h100-80g", "--skip", "2")
    eager = record_script(tmp_path, _ATTENTION.format(compiles=False), *window, name="eager.memprof")
    ended = record_script(tmp_path, _ATTENTION.format(compiles=True), *window, name="compiled.memprof")
    assert any("torch.compile: 2 graphs compiled" in note for note in _compiled_notes(ended))
    kernels = [{name for name in one.step.ops.name if "attention" in name} for one in (eager, ended)]
    assert kernels[0] == kernels[1]
    saved = ended.step.storages.take(np.unique(ended.step.saved.storage_id))
    of_products = np.isin(saved.shape, ["2048x384", "2048x128", "8x256x128"]) & (saved.category == "activation")
    assert "bfloat16" in saved.dtype[of_products]
    assert ended.peak <= eager.peak


def test_what_an_unsupported_compiler_leaves_eager_is_known_to_be_compiled(tmp_path: Path) -> None:
    """Policies that replace saved tensors are refused as for a virtual GPU: the real run compiles the model."""
    ended = _dry_run(tmp_path, "from torch._dynamo import convert_frame; del convert_frame.CatchErrorsWrapper")
    assert "has parts that memprof does not support" in ended.stderr
    with pytest.raises(PolicyError, match=r"torch\.compile generates"):
        Swap(to="disk").transform(ended.step)


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("model", ["unet", "dynamic", "breaks", "checkpointed", "bert"])
def test_peak_is_that_of_the_compiled_run_to_the_byte(tmp_path: Path, model: str) -> None:
    """Convolutions, other sizes in each step, broken graphs, recomputation and dropout inside."""
    window = ("--skip", "2", "--steps", "2")
    real = record(tmp_path, "--stop", *window, str(_MODELS), model, name="real.memprof")
    dry = record(tmp_path, "--dry-run", *window, str(_MODELS), model, name="dry.memprof")
    assert dry.trace.step_peaks() == real.trace.step_peaks()


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("own", [True, False], ids=["job compiles", "plan compiles"])
def test_a_budget_of_the_compiler_is_kept_in_a_dry_run(tmp_path: Path, *, own: bool) -> None:
    """The plan's budget also holds in what the job compiles itself, where a region of the plan is only inlined."""
    words = ("--compile", ".@0.3", str(_MODELS), "gpt", *(() if own else ("--eager",)))
    real = record(tmp_path, "--stop", *words, name="real.memprof")
    dry = record(tmp_path, "--dry-run", *words, name="dry.memprof")
    whole = record(tmp_path, "--dry-run", str(_MODELS), "gpt", name="whole.memprof")
    assert dry.peak == real.peak < whole.peak


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
def test_a_checkpoint_is_part_of_the_compiled_graphs(tmp_path: Path) -> None:
    """Regions are traced with the model around them, without a graph break, and the peak is the real run's."""
    job = _LAYERS.replace("for layer in model.layers:\n    layer.compile()", "model = torch.compile(model)")
    job = job.replace("torch.randn(64, 16)", "torch.randn(4096, 16)")
    plain = record_script(tmp_path, job, "--dry-run").peak
    flags = ("--checkpoint", "layers.*")
    ended = record_script(tmp_path, job, "--dry-run", *flags)
    assert _compiled_notes(ended) == ["torch.compile: 2 graphs compiled as in a real run, up to the kernels"]
    assert ended.peak < plain
    assert record_script(tmp_path, job, *flags).peak == ended.peak


@pytest.mark.slow
def test_a_dry_run_leaves_no_files_of_the_compiler(tmp_path: Path) -> None:
    """Generated code is written to a folder that is removed when the job ends."""
    (tmp_path / "train.py").write_text(_JOB.format(setup=""))
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "memprof.cli.main", "record", "--dry-run", "-q", "-o", "run.memprof", "train.py"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert not list(folder.rglob("*.py"))


_CPP = """
cpp_fused_gelu_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* in_out_ptr0,
                       float* out_ptr1)
{
}
''')
"""


@pytest.mark.parametrize(
    ("sources", "written", "filled"),
    [
        ((["const float*", "float*", "const int64_t", "float*"], "..."), {1, 3}, set()),
        (
            ("triton_poi_0", "@triton.jit\ndef triton_poi_0(in_ptr0, in_out_ptr0, out_ptr1, xnumel):\n  pass"),
            {1, 2},
            {2},
        ),
        ((), set(), set()),
    ],
    ids=["C++", "Triton", "unknown"],
)
def test_what_a_kernel_writes_is_read_from_its_source(
    sources: tuple[object, ...], written: set[int], filled: set[int]
) -> None:
    """The types of its arguments in C++, the names of its parameters in Triton; not what a buffer held before."""
    assert kernel_access(sources) == (written, filled)


def test_kernels_in_cpp_are_read_from_generated_code() -> None:
    """Their names, and the arguments they write to, with and without reading them."""
    assert list(cpp_kernels(_CPP)) == [("cpp_fused_gelu_0", ({1, 2}, {2}))]


@pytest.mark.parametrize(
    ("line", "written", "names"),
    [
        ("    buf4 = buf3; del buf3  # reuse", set(), ["buf4"]),
        ("    extern_kernels.mm(buf1, reinterpret_tensor(buf2, (4, ), (1, ), 0), out=buf8)", set(), ["buf8"]),
        ("    cpp_fused_add_0(buf1, reinterpret_tensor(buf2, (4, ), (1, ), 0), buf3)", {1, 2}, ["buf2", "buf3"]),
        ("    triton_poi_0.run(buf1, buf2, 64, stream=stream0)", {1}, ["buf2"]),
        ("    aten.index_put_(buf5, [buf6], buf7, True)", set(), ["buf5"]),
        ("    with torch.cuda._DeviceGuard(0):", set(), []),
        ("    del buf3", set(), []),
        ("", set(), []),
    ],
    ids=["reuse", "operator", "C++", "Triton", "in place", "no statement", "del", "empty"],
)
def test_what_a_line_makes_is_read_from_generated_code(line: str, written: set[int], names: list[str]) -> None:
    """Assigned names, the keyword out, what a kernel writes to, or the first argument of an in-place operator."""
    assert made_by(line, frozenset(written)) == names


_COMPILED_UPDATE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
update = torch.compile(optimizer.step)
for step in range(4):
    model(torch.randn(32, 64)).square().mean().backward()
    update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "is_compared",
    [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.skipif(not _HAS_COMPILER, reason="no compiler")])],
    ids=["alone", "with a real run"],
)
def test_an_update_is_compiled_once_its_state_exists(tmp_path: Path, is_compared: bool) -> None:
    """The first runs eagerly; then, one kernel updates everything, and the step is that of a real run."""
    window = ("--skip", "2", "--steps", "1", "--stop")
    dry = record_script(tmp_path, _COMPILED_UPDATE, "--dry-run", *window, name="dry.memprof").step
    (kernel,) = dry.ops.name[dry.ops.phase == "optimizer"].tolist()
    assert kernel.startswith("inductor.cpp_fused_")
    if is_compared:
        real = record_script(tmp_path, _COMPILED_UPDATE, *window, name="real.memprof").step
        assert dry.ops.name.tolist() == real.ops.name.tolist()
        difference = live_bytes(dry).during - live_bytes(real).during
        assert np.abs(difference).max() <= 64  # what the kernel of a mean takes
