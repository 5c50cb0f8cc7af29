"""Kernels of Triton are not launched on a virtual card, where no driver could compile them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memprof.virtual.device.kernels import triton_launches
from tests.recorder.recorded import record

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
