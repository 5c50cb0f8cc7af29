"""Compiles what the job compiles, up to the kernels, with the dry run's modes suspended."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.clock import clock_ns
from memprof.recorder.compiled.generated_operators import KernelAccess, allocation_traits, kernel_traits
from memprof.recorder.compiled.provenance import Provenance
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.virtual.compiling.region_notes import RegionNotes, first_line
from memprof.virtual.compiling.virtual_compiler import (
    GRAPH_SAFE_STATES,
    SETTINGS,
    Kernel,
    is_update,
    left_eager,
    place_on_device,
    prepare_compiler,
    replace_generated_calls,
)
from memprof.virtual.mode import lent
from memprof.virtual.tensors.subclasses import lend_parts

if TYPE_CHECKING:
    from memprof.recorder.calls.operator_rows import OperatorRows
    from memprof.recorder.operators import OperatorMode
    from memprof.recorder.profiler.sources import MemorySources
    from memprof.recorder.steps.usages import Usages
    from memprof.virtual.mode import DryMode

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_CUDA_GRAPHS = "triton.cudagraphs"
#: Settings of inductor that would run kernels while compiling, generate no Python, or read what a real run cached.
_SETTINGS: dict[str, Any] = {
    "force_disable_caches": True,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    _CUDA_GRAPHS: False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "cpp.vec_isa_ok": True,
    "compile_threads": 1,
}
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class CompiledRegions:
    """The job's compiled regions: traced and lowered by torch on shapes, then run without kernels.

    A region that cannot be lowered runs eagerly, and a note gives the reason.
    """

    def __init__(
        self, mode: DryMode, refuse: Callable[[str], NoReturn], *, is_virtual: bool, is_whole: bool = False
    ) -> None:
        """Changes nothing yet.

        Args:
            mode: The dry run's mode.
            refuse: Ends the job with a message.
            is_virtual: Whether the job runs on a virtual GPU.
            is_whole: Whether calls that repeat earlier ones are skipped; nothing can be compiled then.
        """
        self._mode = mode
        self._is_whole = is_whole
        self._refuse = refuse
        self._is_virtual = is_virtual
        self._operators: OperatorMode | None = None
        self._sources: MemorySources | None = None
        self._usages: Usages | None = None
        self._leaves_models = False
        self._kernels: dict[tuple[str, KernelAccess], OperatorTraits] = {}
        self._allocation: OperatorTraits | None = None
        self._provenance = Provenance()
        self._notes = RegionNotes(is_virtual=is_virtual)
        self._is_ready: bool | None = None

    def adopt(self, operators: OperatorMode, rows: OperatorRows, sources: MemorySources, usages: Usages) -> None:
        """Sets the recorder's components, once it records."""
        self._operators, self._sources, self._usages = operators, sources, usages
        self._provenance.adopt(rows)
        if self._leaves_models:
            usages.compile_model()

    def notes(self) -> list[str]:
        """Returns notes on the graphs that were compiled, and on those that were not."""
        return self._notes.sentences()

    def prepare(self, function: Any) -> bool:
        """Replaces torch's compiler, once, before the job uses it.

        Returns:
            Whether it can be compiled; otherwise it runs eagerly.
        """
        if self._is_whole:
            self._refuse("--whole does not skip calls of compiled code yet: leave --whole or torch.compile out.")
        if self._is_virtual and is_update(function):  # torch traces it on tensors of the card, which have no memory
            self._notes.leave("an optimizer's step is not compiled in a dry run on a virtual GPU")
            return False
        if self._is_ready is None:
            self._is_ready = self._prepare()
        if not self._is_ready:
            self._leave(f"the compiler of torch {torch.__version__} has parts that memprof does not support", function)
        return self._is_ready

    def _leave(self, reason: str, function: Any) -> None:
        """Notes what runs eagerly here, and is compiled in a real run."""
        self._notes.leave(reason)
        if isinstance(getattr(function, "__self__", function), torch.nn.Module):
            self._leaves_models = True
            if self._usages is not None:
                self._usages.compile_model()

    def _prepare(self) -> bool:
        from torch._dynamo import convert_frame
        from torch._inductor import compile_fx as compiler

        entry: Any = getattr(convert_frame, "CatchErrorsWrapper", None)
        module: Any = compiler
        if entry is None or not hasattr(module, "compile_fx_inner"):
            return False
        try:
            replace_generated_calls(self._run_fake, self._born, self._ran)
            if self._is_virtual:
                prepare_compiler(module)
        except (AttributeError, ImportError):
            return False
        self._provenance.observe()
        folder = tempfile.mkdtemp(prefix="torchinductor_memprof_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[_CACHE] = folder
        if self._is_virtual:
            entry.__call__ = left_eager(entry.__call__, self._notes.fail)
        entry.__call__ = self._suspended_in(entry.__call__)
        module.compile_fx = self._lowering(module.compile_fx, module.compile_fx_inner)
        return True

    def _suspended_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def compile_frame(this: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            with self._suspended():
                lend_parts(frame.f_locals.values(), partial(lent, mode=self._mode))
                return function(this, frame, *args, **kwargs)

        return compile_frame

    def _lowering(self, compile_fx: Callable[..., Any], compile_inner: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo import exc
        from torch._functorch import config as tracing
        from torch._inductor import config

        control = (exc.RestartAnalysis, exc.SkipFrame)  # raised to trace the function again, or not at all
        chosen = {**_SETTINGS, **SETTINGS} if self._is_virtual else _SETTINGS
        settings = {name: value for name, value in chosen.items() if _has(config, name)}
        for_tracing: dict[str, Any] = {"enable_autograd_cache": False}
        if self._is_virtual and _has(tracing, GRAPH_SAFE_STATES):
            for_tracing[GRAPH_SAFE_STATES] = False

        def lower(graph: Any, inputs: Any, **options: Any) -> Any:
            """Returns the compiled graph; it is called again for each variant, such as one without gradients."""
            patches = options.pop("config_patches", None) or {}
            self._notes.has_cuda_graphs |= (
                bool(patches.get(_CUDA_GRAPHS, config.triton.cudagraphs)) and self._is_virtual
            )
            patches = {**patches, **settings}
            self._notes.settings.read()
            inner = self._running(options.get("inner_compile", compile_inner))
            options["inner_compile"] = config.patch(patches)(inner)
            try:
                with config.patch(patches), tracing.patch(for_tracing):
                    return compile_fx(graph, _examples(graph, inputs), **options)
            except control:
                raise
            except Exception as error:  # noqa: BLE001 - whatever inductor raises, the region can still run eagerly
                self._notes.fail(error)
                return graph

        return lower

    def _running(self, compile_inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps inductor's compiler of one graph: forward, backward, or both."""

        @wraps(compile_inner)
        def compile_graph(*args: Any, **kwargs: Any) -> Any:
            placed = self._provenance.graphs
            if self._is_virtual:
                place_on_device(args[0])
            compiled = compile_inner(*args, **kwargs)
            self._notes.graphs += 1
            run = getattr(compiled, "current_callable", None)
            if run is not None:
                self._notes.unplaced += self._provenance.graphs == placed

                def run_or_refuse(inputs: Any) -> Any:
                    try:
                        return run(inputs)
                    except Exception as error:  # noqa: BLE001 - the generated code, not the job, failed
                        self._refuse(
                            f"the code of a compiled region cannot be dry-run: {first_line(error)}. Dry-run the job "
                            "with TORCHDYNAMO_DISABLE=1, which runs it eagerly, or record a real run."
                        )

                skip_compiling(run_or_refuse)
                compiled.current_callable = run_or_refuse
            return compiled

        return compile_graph

    def _run_fake(self, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._suspended(), torch.no_grad(), self._mode:
            made: torch.Tensor = function(*args, **kwargs)
        return made

    def _born(self, tensor: torch.Tensor, frame: FrameType) -> None:
        operators, sources = self._recording(), self._sources
        if operators is not None:
            if self._allocation is None:
                self._allocation = allocation_traits(operators.intern)
            self._add_row(operators, self._allocation, (), tensor, frame)
        elif sources is not None and sources.is_open and sources.on_output is not None:
            sources.on_output(tensor, clock_ns())

    def _ran(self, kernel: Kernel, arguments: Sequence[Any], frame: FrameType) -> None:
        operators = self._recording()
        if operators is None:
            return
        key = kernel.name, kernel.access  # kernels of two graphs may have one name
        traits = self._kernels.get(key)
        if traits is None:
            traits = kernel_traits(kernel, kernel.name, kernel.access, operators.intern)
            self._kernels[key] = traits
        self._add_row(operators, traits, arguments, None, frame)

    def _recording(self) -> OperatorMode | None:
        """Returns the recorder's mode while it logs the operators of this thread."""
        operators = self._operators
        return operators if operators is not None and operators.is_on and operators.is_here() else None

    def _add_row(
        self, operators: OperatorMode, traits: OperatorTraits, arguments: Sequence[Any], result: Any, frame: FrameType
    ) -> None:
        now_ns = clock_ns()
        with self._suspended():
            operators.rows.add(traits, arguments, None, result, now_ns, now_ns, frame)

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
    """Returns the tensors that the graph was traced with in place of the job's.

    Numbers that TorchDynamo made tensors of stay what they are: it reads their values.
    """
    traced = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    if len(traced) != len(inputs):
        return list(inputs)
    return [
        example if example is not None and isinstance(given, FakeTensor) else given
        for given, example in zip(inputs, traced, strict=True)
    ]


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
