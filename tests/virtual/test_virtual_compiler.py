"""TorchDynamo, kernels of Triton and CUDA graphs on a virtual GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memprof.virtual.device.kernels import triton_launches
from tests.recorder.recorded import record, record_script

_CARD = ("--dry-run", "--device", "h100-80g")


_MODULES = """
import torch, torch._dynamo  # before the first module
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(3)])
    def forward(self, x):
        if isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("traced")
        for layer in self.layers[1:]:  # makes a module
            x = layer(x).relu()
        return x
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, fullgraph=True)
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        compiled(torch.randn(1024, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


_WRAPPED = """
import torch
from torch import nn
from torch.utils._pytree import tree_map
class Halves(torch.Tensor):
    @staticmethod
    def __new__(cls, low, high):
        size = (2 * low.shape[0], *low.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=low.dtype, device=low.device)
    def __init__(self, low, high):
        self.low, self.high = low, high
    def __tensor_flatten__(self):
        return ["low", "high"], None
    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["low"], inner["high"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = lambda value: torch.cat([value.low, value.high]) if isinstance(value, cls) else value
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
@torch.compile(fullgraph=True, dynamic=False)
def update(weight, state):
    weight.sub_(state.float() * 0.1 + 1)
model = nn.Linear(64, 64, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = Halves(torch.zeros(32, 64, device="cuda"), torch.zeros(32, 64, device="cuda"))
print(state.device)
for step in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    with torch.no_grad():
        update(model.weight.detach(), state)
"""


@pytest.mark.slow
def test_compiled_functions_make_modules_and_look_for_fakes(tmp_path: Path) -> None:
    """Neither breaks the graph; products in bfloat16 have that type's rate, and allocations take no time."""
    ended = record_script(tmp_path, _MODULES, *_CARD)
    assert "2 graphs compiled as in a real run" in ended.stderr
    assert "ran eagerly" not in ended.stderr
    ops, speed = ended.step.ops, ended.trace.manifest.machine.speed
    products = ops.take(ops.name == "aten.addmm.out")
    np.testing.assert_allclose(products.duration_us, products.flops / speed.bf16_flops_per_us, rtol=0.01)
    assert (products.written_bytes == 1024 * 1024 * 2).all()
    assert (products.read_bytes == (2 * 1024 * 1024 + 1024) * 2).all()  # not what the buffer held before
    assert not ops.duration_us[ops.name == "aten.empty_strided.default"].any()


@pytest.mark.slow
def test_tensors_that_wrap_others_are_traced(tmp_path: Path) -> None:
    """As the states of quantized optimizers, whose update is compiled as a whole."""
    ended = record_script(tmp_path, _WRAPPED, *_CARD)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "cuda:0"
    assert "1 graph compiled as in a real run" in ended.stderr
    assert "ran eagerly" not in ended.stderr


#: Triton's names as far as a launch needs them: it comes with CUDA builds of torch alone, and asks the driver.
_TRITON = {
    "__init__.py": "",
    "runtime/__init__.py": "",
    "runtime/jit.py": """
class JITFunction:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        raise AssertionError("libcuda.so cannot be found")
""",
    "runtime/autotuner.py": """
from triton.runtime.jit import JITFunction


class Autotuner(JITFunction):
    def run(self, *args, **kwargs):
        raise AssertionError("there is nothing to time")
""",
}


@pytest.fixture
def without_triton() -> Iterator[None]:
    """Nothing of Triton is imported after the test, either."""
    assert importlib.util.find_spec("triton") is None  # the CPU's build of torch comes without it
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]


@pytest.mark.usefixtures("without_triton")
def test_launches_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel and an autotuned one are launched as their libraries do it, and return."""
    for name, text in _TRITON.items():
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found]
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]

    with pytest.raises(AssertionError, match="libcuda"):
        JITFunction()[(8,)](1, BLOCK=2)
    triton_launches.install()
    assert JITFunction()[(8,)](1, BLOCK=2) is None
    assert Autotuner()[lambda meta: (meta["BLOCK"],)](1, n=3) is None


_TRAINS = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("looks", [True, False])
def test_a_job_that_looks_for_triton_in_vain_is_noted(tmp_path: Path, looks: bool) -> None:
    """Libraries then run other code than on the card; torch's own searches are not the job's."""
    (tmp_path / "kernels.py").write_text("import importlib.util\nFOUND = importlib.util.find_spec('triton')\n")
    (tmp_path / "job.py").write_text(_TRAINS.replace("import torch", "import torch, kernels") if looks else _TRAINS)
    trace = record(tmp_path, "--dry-run", "--device", "rtx4090", "job.py").trace
    found = [note for note in trace.manifest.notes if "Triton is not installed" in note]
    assert ["kernels looked for it" in note for note in found] == [True] * looks


_JOB = """
import json
import torch
from torch import nn

def reserved():
    torch.cuda.empty_cache()
    said.append(torch.cuda.memory_reserved() // (1 << 20))

said = []
model = nn.Linear(64, 64).cuda()
x = torch.randn(8 << 20, device="cuda")
first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
reserved()
with torch.cuda.graph(first):
    assert torch.cuda.is_current_stream_capturing()
    y = x * 2
assert not torch.cuda.is_current_stream_capturing()
del y
reserved()
with torch.cuda.graph(second, pool=first.pool()):
    y = x * 3
del y
reserved()
with torch.cuda.graph(third):
    y = x * 4
    del y
    y = x * 5
del y
reserved()
for graph in (first, second, third):
    graph.replay()
reserved()
try:
    torch.cuda.CUDAGraph().replay()
except RuntimeError as error:
    said.append(str(error))
print("SAID", json.dumps(said))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sample = torch.randn(8, 64, device="cuda")
model = torch.cuda.make_graphed_callables(model, (sample,))
for _ in range(4):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def test_captures_allocate_from_pools_that_stay_reserved(tmp_path: Path) -> None:
    """Results of 32 MiB: one segment for the first pool, which two graphs share, and one for the third graph's own."""
    done = record_script(tmp_path, _JOB, "--dry-run", "--device", "rtx4090")
    line = next(line for line in done.stdout.splitlines() if line.startswith("SAID"))
    before, *after, refused = json.loads(line.removeprefix("SAID"))
    assert [size - before for size in after] == [32, 32, 64, 64]
    assert "without a preceding successful capture" in refused
    # Of the graphed callable, one for forward and one for backward.
    assert any("CUDA graphs captured: 5" in note for note in done.trace.manifest.notes)
