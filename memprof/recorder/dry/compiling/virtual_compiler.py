"""Has torch's compiler generate code for a virtual GPU, without one and without Triton, whose kernels do not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from memprof.recorder.dry.device.calls import ATTENTION, DeviceCalls
from memprof.recorder.dry.device.face import FACE, as_seen

#: Settings of inductor that would compute with tensors on the GPU while it compiles.
SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}

#: Setting of AOTAutograd that keeps the states of the GPU's random generators, which a dry run lacks, in graphs.
GRAPH_SAFE_STATES = "graphsafe_rng_functionalization"


def prepare_compiler(compiler: Any) -> None:
    """Replaces, for the rest of the process, what torch's compiler asks of a GPU and of Triton.

    Args:
        compiler: The module ``torch._inductor.compile_fx``.

    Raises:
        AttributeError: The compiler of this torch has other parts.
        ImportError: It has other modules.
    """
    from torch._dynamo.variables import torch_function
    from torch._inductor import scheduler
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch.utils import _triton

    _hide_device_calls(torch_function)
    torch_module: Any = torch
    setattr(torch_module, FACE.type, torch.cuda)  # checkpointing asks for the module of a traced tensor's device
    for owner, name in ATTENTION:
        torch_module.compiler.allow_in_graph(getattr(owner, name))  # chooses its kernel while AOTAutograd traces
    _replace(compiler, "_recursive_joint_graph_passes", _placing)
    _replace(scheduler, "has_triton", _answering(True))
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
