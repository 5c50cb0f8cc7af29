"""Compiles what the job compiles, up to the kernels, with the dry run's modes suspended."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memprof.recorder.calls.uncompiled import skip_compiling
from memprof.recorder.clock import clock_ns
from memprof.recorder.dry.answers import Answers
from memprof.recorder.dry.compiling.generated_code import replace_generated_calls

if TYPE_CHECKING:
    from memprof.recorder.dry.mode import DryMode
    from memprof.recorder.operators import OperatorMode
    from memprof.recorder.profiler.sources import MemorySources

_FAKE = torch._C._TorchDispatchModeKey.FAKE
#: Settings of inductor that would run kernels while compiling, generate no Python, or read what a real run cached.
_SETTINGS: dict[str, Any] = {
    "force_disable_caches": True,
    "cpp_wrapper": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "cpp.vec_isa_ok": True,
    "compile_threads": 1,
}
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class CompiledRegions:
    """The job's compiled regions: traced and lowered by torch on shapes, then run without kernels.

    A region that cannot be lowered here runs eagerly, which a note says.
    """

    def __init__(self, mode: DryMode, answers: Answers, refuse: Callable[[str], NoReturn]) -> None:
        """Changes nothing yet.

        Args:
            mode: The dry run's mode.
            answers: Counts the regions that ran eagerly.
            refuse: Ends the job with a message.
        """
        self._mode = mode
        self._answers = answers
        self._refuse = refuse
        self._operators: OperatorMode | None = None
        self._sources: MemorySources | None = None
        self._depth = 0
        self._graphs = 0
        self._is_ready = False

    def adopt(self, operators: OperatorMode, sources: MemorySources) -> None:
        """Sets the recorder's components, once it records."""
        self._operators, self._sources = operators, sources

    def notes(self) -> list[str]:
        """Returns a note on how many graphs were compiled."""
        if not self._graphs:
            return []
        graphs = f"{self._graphs} graph{'s' if self._graphs > 1 else ''}"
        return [f"torch.compile: {graphs} compiled as in a real run, up to the kernels, whose buffers are recorded"]

    def prepare(self) -> None:
        """Replaces torch's compiler, once, before the job uses it."""
        if self._is_ready:
            return
        self._is_ready = True
        from torch._dynamo import convert_frame
        from torch._inductor import compile_fx as compiler

        folder = tempfile.mkdtemp(prefix="memprof-inductor-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[_CACHE] = folder
        replace_generated_calls(self._run_fake, self._born)
        entry: Any = convert_frame.CatchErrorsWrapper
        entry.__call__ = self._suspended_in(entry.__call__)
        module: Any = compiler
        module.compile_fx = self._lowering(module.compile_fx)

    def _suspended_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def compile_frame(*args: Any, **kwargs: Any) -> Any:
            with self._suspended():
                return function(*args, **kwargs)

        return compile_frame

    def _lowering(self, compile_fx: Callable[..., Any]) -> Callable[..., Any]:
        from torch._functorch import config as tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        settings = {name: value for name, value in _SETTINGS.items() if _has(config, name)}

        def lower(graph: Any, inputs: Any, **options: Any) -> Any:
            """Returns the compiled graph; inputs are those of the job, of another fake mode than the graph's."""
            patches = {**(options.pop("config_patches", None) or {}), **settings}
            options["inner_compile"] = config.patch(patches)(options.get("inner_compile", compile_fx_inner))
            with config.patch(patches), tracing.patch(enable_autograd_cache=False):
                return compile_fx(graph, _examples(graph, inputs), **options)

        return lower

    def _run_fake(self, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._suspended(), torch.no_grad(), self._mode:
            made: torch.Tensor = function(*args, **kwargs)
        return made

    def _born(self, tensor: torch.Tensor) -> None:
        sources = self._sources
        if sources is not None and sources.is_open and sources.on_output is not None:
            sources.on_output(tensor, clock_ns())

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """Suspends the dry run and the recorder on this thread."""
        operators = self._operators
        is_here = operators is not None and operators.is_here()
        was_on = operators is not None and operators.is_on
        fake = torch._C._unset_dispatch_mode(_FAKE)
        if operators is not None and is_here:
            operators.slide_out()
        try:
            yield
        finally:
            if operators is not None and is_here:
                operators.slide_in()
                operators.is_on = was_on
            if fake is not None:
                torch._C._unset_dispatch_mode(_FAKE)
                torch._C._set_dispatch_mode(fake)


def _examples(graph: Any, inputs: Any) -> list[Any]:
    """Returns the tensors that the graph was traced with in place of the job's."""
    traced = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    if len(traced) != len(inputs):
        return list(inputs)
    return [given if example is None else example for given, example in zip(inputs, traced, strict=True)]


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
