"""The functions below ``torch.cuda``, named ``torch._C._cuda_...``, for the device of a dry run.

A CPU build of torch lacks them, though Python code of torch and of libraries calls them; in a CUDA build they need a
driver. With these in their place, ``torch.cuda`` itself runs as it does on a GPU. ``cuda_names.json`` lists what CUDA
builds have; what is listed, or present in this build, and not written here is refused with a sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from memprof.machines.card import Card
from memprof.virtual.device.current import CURRENT, ORDINALS
from memprof.virtual.device.memory import VirtualMemory
from memprof.virtual.device.streams import CUDA_TYPE, CUDAGraph, Event, Stream

#: What ``torch.version.cuda`` says where torch was built without CUDA.
CUDA_VERSION = "13.0"
#: What of ``torch._C`` is below ``torch.cuda``.
_PREFIXES = ("_cuda_", "_CUDA", "_Cuda")
#: Bytes of cuBLAS's and cuBLASLt's workspaces that a job reads back, where it has set none.
_WORKSPACE_BYTES = 8_519_680


def install(card: Card, memory: VirtualMemory) -> None:
    """Puts the functions and classes into ``torch._C``."""
    written = {
        **_device(card),
        **_streams(),
        **_memory(memory),
        **_libraries(),
        "_CudaDeviceProperties": DeviceProperties,
        "_CudaStreamBase": Stream,
        "_CudaEventBase": Event,
        "_CUDAGraph": CUDAGraph,
        "_cudart": _runtime(card, memory),
    }
    for name, (kind, _, _) in names()["native"].items():
        if name not in written:
            written[name] = _refusing_class(name) if kind == "class" else _refusal(name)
    for name in dir(torch._C):  # a CUDA build has more than its stubs list
        if name.startswith(_PREFIXES) and name not in written:
            is_class = isinstance(getattr(torch._C, name), type)
            written[name] = _refusing_class(name) if is_class else _refusal(name)
    originals = {id(original): written[name] for name, original in vars(torch._C).items() if name in written}
    for name, value in written.items():
        setattr(torch._C, name, value)
    _rebind(originals)


def _rebind(replaced: dict[int, Any]) -> None:
    """Replaces what torch's modules have imported from ``torch._C`` by name; in a CPU build, nothing of it exists.

    Args:
        replaced: The replacement of each original, by the original's ``id``.
    """
    for module_name, module in list(sys.modules.items()):
        if module is torch._C or not module_name.startswith("torch."):
            continue
        bound = getattr(module, "__dict__", {})
        for name in [name for name, value in bound.items() if id(value) in replaced]:
            bound[name] = replaced[id(bound[name])]


@cache
def names() -> dict[str, Any]:
    """Returns what CUDA builds of torch have: ``native`` and ``public`` names with kind, first and last version."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "cuda_names.json").read_text(encoding="utf-8"))
    return found


class DeviceProperties(SimpleNamespace):
    """Properties of a device, with the attributes of CUDA's."""


def properties_of(card: Card) -> DeviceProperties:
    """Returns the properties of a card; those of no use without a kernel have values of an ordinary one."""
    major, minor = card.capability
    return DeviceProperties(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.capacity_bytes,
        multi_processor_count=card.machine.multiprocessors,
        max_threads_per_multi_processor=card.architecture.threads,
        max_threads_per_block=1024,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=101_376,
        shared_memory_per_multiprocessor=102_400,
        L2_cache_size=41_943_040,
        clock_rate=1_410_000,
        memory_clock_rate=1_215_000,
        memory_bus_width=5120,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _runtime(card: Card, memory: VirtualMemory) -> SimpleNamespace:
    """Returns the CUDA runtime's module, as ``torch.cuda.cudart()`` gives it."""
    success = SimpleNamespace(success=0)

    def free_and_total(_device: Any = 0) -> tuple[int, int]:
        used = memory.reserved_bytes + card.context_bytes
        return max(card.capacity_bytes - used, 0), card.capacity_bytes

    def done(*_: Any, **__: Any) -> int:
        return 0

    return SimpleNamespace(
        cudaError=success,
        cudaMemGetInfo=free_and_total,
        cudaGetErrorString=lambda code: "no error" if code == 0 else f"CUDA error {code}",
        cudaProfilerStart=done,
        cudaProfilerStop=done,
        cudaProfilerInitialize=done,
        cudaHostRegister=done,
        cudaHostUnregister=done,
        cudaStreamCreate=done,
        cudaStreamDestroy=done,
    )


def _device(card: Card) -> dict[str, Any]:
    major, minor = card.capability
    version = [int(part) for part in (torch.version.cuda or CUDA_VERSION).split(".")[:2]]
    sync_debug = {"mode": 0}

    def exchange(device: int) -> int:
        ORDINALS.check(device)
        return ORDINALS.index

    return {
        "_cuda_init": nothing,
        "_cuda_getDeviceCount": lambda: ORDINALS.count,
        "_cuda_getDevice": lambda: ORDINALS.index,
        "_cuda_setDevice": ORDINALS.use,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_hasPrimaryContext": lambda device: device == ORDINALS.index,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda device, peer_device: False,
        "_cuda_getCompiledVersion": lambda: version[0] * 1000 + version[1] * 10,
        "_cuda_getArchFlags": lambda: f"sm_{major}{minor}",
        "_cuda_synchronize": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_sleep": nothing,
        "_cuda_set_sync_debug_mode": lambda warn_level: sync_debug.update(mode=int(warn_level)),
        "_cuda_get_sync_debug_mode": lambda: sync_debug["mode"],
        "_cuda_lock_mutex": nothing,
        "_cuda_unlock_mutex": nothing,
    }


def _streams() -> dict[str, Any]:

    def default(*_: Any) -> tuple[int, int, int]:
        return 0, ORDINALS.index, CUDA_TYPE

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        ORDINALS.check(device_index)
        CURRENT.stream = (stream_id, device_index, device_type)

    return {
        "_cuda_getCurrentStream": lambda device: CURRENT.stream or default(),
        "_cuda_getDefaultStream": default,
        "_cuda_getCurrentRawStream": lambda device: (CURRENT.stream or default())[0],
        "_cuda_getStreamFromExternal": lambda data_ptr, device_index: (data_ptr, device_index, CUDA_TYPE),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: CURRENT.is_capturing,
    }


def _memory(memory: VirtualMemory) -> dict[str, Any]:
    fraction = {"of": 1.0}

    def limit(share: float, device: int) -> None:
        ORDINALS.check(device)
        fraction["of"] = share
        memory.set_fraction(share)

    return {
        "_cuda_memoryStats": lambda device: memory.stats(),
        "_cuda_resetPeakMemoryStats": lambda device: memory.reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: memory.reset_accumulated(),
        "_cuda_emptyCache": lambda *_: memory.empty_cache(),
        "_cuda_getMemoryFraction": lambda device: fraction["of"],
        "_cuda_setMemoryFraction": limit,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, cuda_stream: memory.take_raw(size),
        "_cuda_cudaCachingAllocator_raw_delete": memory.give_raw,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": nothing,
        "_cuda_resetAccumulatedHostMemoryStats": nothing,
        "_cuda_memorySnapshot": lambda *_: memory.snapshot(),
        "_cuda_record_memory_history": memory.history.configure,
        "_cuda_record_memory_history_legacy": memory.history.configure_as_before,
        "_cuda_isHistoryEnabled": lambda: memory.history.is_on,
        "_cuda_allocationTraceback": lambda data_ptr: None,
        "_cuda_memoryMetadataSupported": lambda: True,
        "_cuda_setMemoryMetadata": partial(setattr, memory.history, "metadata"),
        "_cuda_getMemoryMetadata": lambda: memory.history.metadata,
        "_cuda_annotateMemory": nothing,
        "_cuda_attach_out_of_memory_observer": memory.observers.append,
        "_host_emptyCache": nothing,
    }


def _libraries() -> dict[str, Any]:
    """Returns what concerns cuBLAS and cuDNN: settings are kept, and change nothing."""
    settings: dict[str, int] = {}

    def setting(name: str, default: int) -> tuple[Callable[..., int], Callable[..., None]]:
        return lambda: settings.get(name, default), lambda value: settings.update({name: value})

    get_blas, set_blas = setting("cublas", _WORKSPACE_BYTES)
    get_lt, set_lt = setting("cublaslt", _WORKSPACE_BYTES)
    get_benchmark, set_benchmark = setting("benchmark", 10)
    return {
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_getCurrentSolverHandle": lambda: 1,
        "_cuda_clearCublasWorkspaces": nothing,
        "_cuda_getCublasWorkspaceSize": get_blas,
        "_cuda_setCublasWorkspaceSize": set_blas,
        "_cuda_resetCublasWorkspaceSize": lambda: settings.pop("cublas", None),
        "_cuda_getCublasLtWorkspaceSize": get_lt,
        "_cuda_setCublasLtWorkspaceSize": set_lt,
        "_cuda_resetCublasLtWorkspaceSize": lambda: settings.pop("cublaslt", None),
        "_cuda_get_cudnn_benchmark_limit": get_benchmark,
        "_cuda_set_cudnn_benchmark_limit": set_benchmark,
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cuda_tunableop_is_enabled": lambda: False,
        "_cuda_tunableop_tuning_is_enabled": lambda: False,
        "_cuda_record_untuned_is_enabled": lambda: False,
    }


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"a dry run on a virtual GPU cannot run torch._C.{name}, which needs a real one. Dry-run the job without "
            "it, or record the job on a GPU."
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _refusing_class(name: str) -> type:
    return type(name, (), {"__init__": _refusal(name)})


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing, whatever it is given."""
