"""torch's compiler for a virtual GPU: it generates code without one, and what the code calls is replaced.

Inductor (torch/_inductor) writes one Python function for each graph. It allocates buffers, reuses and deletes them, and
calls fused kernels and torch's operators. Run as it is, with fake buffers and kernels that do nothing, it allocates and
frees what a real run does, in the same order.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.compiled.generated_operators import KernelAccess, kernel_access
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.virtual.device.calls import ATTENTION, DeviceCalls
from memprof.virtual.device.face import FACE, as_seen

#: Settings of inductor that would compute with tensors on the GPU while it compiles.
SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}
#: Setting of AOTAutograd that keeps the states of the GPU's random generators, which a dry run lacks, in graphs.
GRAPH_SAFE_STATES = "graphsafe_rng_functionalization"
#: Allocating functions of torch's C++ library, with the device of what they return.
_ALLOCATING = {
    "_empty_strided_cpu": "cpu",
    "_empty_strided_cpu_pinned": "cpu",
    "_empty_strided_cuda": "cuda",
}
_VIEW = "_reinterpret_tensor"
#: Methods of inductor's AsyncCompile that compile the source of one kernel.
_KERNELS = ("cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "cutlass", "cuda", "halide")


def prepare_compiler(compiler: Any) -> None:
    """Replaces, for the rest of the process, what torch's compiler asks of a GPU and of Triton.

    Args:
        compiler: The module ``torch._inductor.compile_fx``.

    Raises:
        AttributeError: The compiler of this torch has other parts.
        ImportError: It has other modules.
    """
    from torch._dynamo.variables import torch_function
    from torch._inductor import scheduler, select_algorithm
    from torch._inductor.codegen.triton_split_scan import TritonSplitScanKernel
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch.utils import _triton

    _hide_device_calls(torch_function)
    torch_module: Any = torch
    setattr(torch_module, FACE.type, torch.cuda)  # checkpointing asks for the module of a traced tensor's device
    for owner, name in ATTENTION:
        torch_module.compiler.allow_in_graph(getattr(owner, name))  # chooses its kernel while AOTAutograd traces
    _replace(compiler, "_recursive_joint_graph_passes", _placing)
    _replace(scheduler, "has_triton", _answering(True))
    _replace(select_algorithm, "PyCodeCache", _unloaded)
    if importlib.util.find_spec("triton") is None:
        _replace(TritonSplitScanKernel, "scan", _knowing_widths)
    _replace(_triton, "triton_hash_with_backend", _answering("none"))
    for name in ("write_triton_header_once", "write_get_raw_stream_header"):
        _replace(PythonWrapperCodegen, name, _without_triton)
    # Convolutions of a dry run may return another layout, of the same size.
    _replace(torch._C._dynamo.guards, "assert_size_stride", _answering(None))


def left_eager(compile_frame: Callable[..., Any], note: Callable[[Exception], None]) -> Callable[..., Any]:
    """Has functions run eagerly whose tracing fails in torch itself; errors of the job's own stay errors.

    Args:
        compile_frame: TorchDynamo's compiler of one function.
        note: Called with each failure.
    """
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError, Unsupported
    from torch._dynamo.types import ConvertFrameReturn
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

    @wraps(compile_frame)
    def compile_or_skip(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_frame(*args, **kwargs)
        except (BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError) as error:
            note(error)
            return ConvertFrameReturn()
        except Unsupported as error:
            if not isinstance(error.__cause__, UnsupportedFakeTensorException):
                raise
            note(error)
            return ConvertFrameReturn()

    return compile_or_skip


def place_on_device(graph: torch.fx.GraphModule) -> None:
    """Gives the operators of a traced graph the device that Python sees, in place of the one that C++ sees."""

    def place(value: Any) -> Any:
        return as_seen(value) if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, place)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, place)


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _answering(answer: Any) -> Callable[[Any], Any]:
    def change(original: Any) -> Any:
        return lambda *_, **__: answer

    return change


def _placing(passes: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(passes)
    def run(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        place_on_device(graph)
        return passes(graph, *args, **kwargs)

    return run


def _unloaded(cache: Any) -> Any:
    """Returns a cache of the sources of template kernels (flexible attention) that does not import them, nor Triton."""

    def load(code: str, extra: str = "", **_: Any) -> SimpleNamespace:
        key, path = cache.write(code, extra)
        return SimpleNamespace(key=key, __file__=path)

    return type(cache.__name__, (cache,), {"load": staticmethod(load)})


def _knowing_widths(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the code generator of a long cumulative sum, which asks Triton for the widths of types: scratch bytes."""
    language: Any = ModuleType("triton.language")
    for width in (8, 16, 32, 64):
        for name in (f"int{width}", f"uint{width}", f"float{width}"):
            setattr(language, name, SimpleNamespace(primitive_bitwidth=width))
    language.int1, language.bfloat16 = SimpleNamespace(primitive_bitwidth=1), language.float16
    modules = {"triton": ModuleType("triton"), "triton.language": language}

    @wraps(scan)
    def run(*args: Any) -> Any:
        with patch.dict(sys.modules, modules):
            return scan(*args)

    return run


def _without_triton(original: Any) -> Callable[[Any], None]:
    """Returns a function that writes the imports of generated code; the stream is that of kernels that do not run."""

    def write_header(wrapper: Any) -> None:
        if not vars(wrapper).get("_has_memprof_header"):
            wrapper._has_memprof_header = True
            wrapper.imports.writeline("from torch._inductor.runtime.triton_heuristics import start_graph, end_graph")
            wrapper.imports.writeline("get_raw_stream = lambda *_: 0")

    return write_header


def _hide_device_calls(torch_function: Any) -> None:
    """Keeps TorchDynamo from tracing the dry run's function mode into the job's graphs.

    The mode stays on the stack that the graph's guards compare.
    """
    kind = torch_function.SymbolicTorchFunctionState
    start = kind.__init__

    def start_without(this: Any, stack: Any, *args: Any, **kwargs: Any) -> None:
        start(this, [mode for mode in stack if not isinstance(mode, DeviceCalls)], *args, **kwargs)

    kind.__init__ = start_without

    # torch keeps the modes aside while it compiles, and forgets them where that compiles something else (flexible
    # attention with compiled autograd).
    state = torch_function.torch_function_mode_stack_state_mgr
    outer: list[Any] = []
    enter, leave = type(state).__enter__, type(state).__exit__

    def keep(this: Any) -> None:
        outer.append(this.stack)
        enter(this)

    def give_back(this: Any, *error: Any) -> None:
        leave(this, *error)
        this.stack = outer.pop()

    type(state).__enter__, type(state).__exit__ = keep, give_back


class Kernel:
    """A fused kernel, which computes nothing in a dry run.

    Attributes:
        name: Its name in the generated code.
        access: Which of its arguments it writes to.
    """

    def __init__(self, access: KernelAccess, ran: Callable[[Kernel, Sequence[Any], FrameType], None]) -> None:
        """Creates a kernel without a name.

        Args:
            access: Which of its arguments it writes to.
            ran: Called with the kernel, its arguments and the calling frame, whenever the generated code runs it.
        """
        self.name = "kernel"
        self.access = access
        self._ran = ran

    def __call__(self, *arguments: Any, **_: Any) -> None:
        """Reports the run: the generated code has allocated the kernel's outputs before."""
        self._ran(self, arguments, sys._getframe(1))

    def run(self, *arguments: Any, **_: Any) -> None:
        """Reports the run of a Triton kernel."""
        self._ran(self, arguments, sys._getframe(1))


def replace_generated_calls(
    run_fake: Callable[..., torch.Tensor],
    born: Callable[[torch.Tensor, FrameType], None],
    ran: Callable[[Kernel, Sequence[Any], FrameType], None],
) -> None:
    """Replaces, for the rest of the process, the functions that generated code takes from torch when it is loaded.

    Args:
        run_fake: Runs an operator with the dry run's mode alone, unrecorded.
        born: Called with every buffer that is allocated, and the calling frame.
        ran: Called with every kernel that would run, its arguments and the calling frame.

    Raises:
        AttributeError: This torch's generated code calls other functions.
    """
    guards: Any = torch._C._dynamo.guards
    view_of_data = getattr(guards, _VIEW)

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            real: torch.Tensor = view_of_data(tensor, size, stride, offset)
            return real
        return run_fake(torch.as_strided, tensor, size, stride, tensor.storage_offset() + offset)

    def allocating(device: str) -> Callable[..., torch.Tensor]:
        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            made = run_fake(torch.empty_strided, size, stride, dtype=dtype, device=device)
            born(made, sys._getframe(1))
            return made

        skip_compiling(allocate)
        return allocate

    skip_compiling(reinterpret, Kernel.__call__, Kernel.run)
    for name, device in _ALLOCATING.items():
        if hasattr(guards, name):
            setattr(guards, name, allocating(device))
    setattr(guards, _VIEW, reinterpret)
    if hasattr(guards, "assert_alignment"):
        guards.assert_alignment = lambda *_: None  # it reads addresses
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    for name in _KERNELS:
        if hasattr(compiler, name):
            setattr(compiler, name, lambda _, *sources, **__: Kernel(kernel_access(sources), ran))
    compiler.wait = lambda _, scope: _name_kernels(scope)


def _name_kernels(scope: dict[str, Any]) -> None:
    """Names the kernels of generated code, once it is loaded."""
    for name, value in scope.items():
        if isinstance(value, Kernel):
            value.name = name


def is_update(function: Any) -> bool:
    """Whether a function is the step of an optimizer."""
    return isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)


def after_first(update: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled update whose first call runs eagerly.

    The first one creates the optimizer's state. torch would create it while it traces, where the recorder does not see
    it.
    """
    latest = [update, compiled]

    @wraps(update)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (latest.pop(0) if len(latest) > 1 else compiled)(*args, **kwargs)

    return run
