"""Shows a job `torch.cuda` and `torch.accelerator` as they are on the device of a dry run.

``native`` provides what lies below `torch.cuda`, whose own Python code then runs unchanged. What stands here is what
torch decides when it is imported without CUDA, and what would ask the driver of a real GPU.
"""

from __future__ import annotations

import functools
import importlib
import secrets
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.machines.card import Card
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.virtual.device import current, face, native
from memprof.virtual.device.current import CURRENT, ORDINALS
from memprof.virtual.device.job_snapshots import JobSnapshots
from memprof.virtual.device.kernels import triton_launches
from memprof.virtual.device.memory import VirtualMemory
from memprof.virtual.device.streams import CUDAGraph, Event, ExternalStream, Stream, renamed

#: Version of cuDNN reported to a job; torch's choice of attention kernels depends on it (architectures.toml).
_CUDNN_VERSION = 91_501
#: ``default_rng_seed_val`` of torch's Generator.h.
_DEFAULT_SEED = 67_280_421_310_721


def install(card: Card, memory: VirtualMemory, snapshots: JobSnapshots) -> None:
    """Patches torch with this implementation."""
    importlib.import_module("torch.utils.flop_counter")  # warns about components that a CUDA build would include
    native.install(card, memory)
    current.install()
    face.install_types()
    _put(torch._C, {"_has_cuda": True, "_get_accelerator": lambda *_: torch.device("cuda")})
    _put(torch.version, {"cuda": torch.version.cuda or native.CUDA_VERSION})
    _install_state(card)
    _install_classes()
    _install_numbers()
    _put(
        torch.cuda,
        (
            {
                "is_available": _yes,
                "is_bf16_supported": lambda *_, **__: torch.cuda.get_device_capability()[0] >= 8,
                "utilization": lambda *_: 0,
                "memory_usage": lambda *_: 0,
                "device_memory_used": lambda *_: memory.reserved_bytes,
                "temperature": lambda *_: 0,
                "power_draw": lambda *_: 0,
                "clock_rate": lambda *_: 0,
                "list_gpu_processes": lambda *_: "no processes are running",
            }
        ),
    )
    _put(torch.cuda.memory, snapshots.functions())
    _put(
        torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), native.nothing)
    )
    _put(torch.cuda.amp.common, {"amp_definitely_not_available": _no})
    cudnn = {"is_available": _yes, "version": lambda: _CUDNN_VERSION, "is_acceptable": lambda tensor: tensor.is_cuda}
    _put(torch.backends.cudnn, cudnn)
    _put(torch, {"_use_cudnn_rnn_flatten_weight": _no})  # weights stay separate: their bytes are the same
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        _install_accelerator(accelerator)
    triton_launches.install()


def _put(owner: Any, answers: dict[str, Any]) -> None:
    """Replaces attributes; a function stands in under the name and the signature of the one that it replaces."""
    for name, answer in answers.items():
        original = getattr(owner, name, None)
        setattr(owner, name, _standing_in(original, answer) if isinstance(original, FunctionType) else answer)


def _standing_in(original: FunctionType, answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    skip_compiling(stand_in)
    return stand_in


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _install_state(card: Card) -> None:
    """Sets what `torch.cuda` has found out about the machine: that there is a device, and that it is initialized."""
    properties = native.properties_of(card)

    def properties_of(device: int) -> native.DeviceProperties:
        ORDINALS.check(device)
        return properties

    _put(
        torch.cuda,
        {
            "_initialized": True,
            "_cached_device_count": ORDINALS.count,
            "_cudart": torch._C._cudart,  # type: ignore[attr-defined]  # put there by native
            "_is_in_bad_fork": _no,
            "_exchange_device": torch._C._cuda_exchangeDevice,
            "_maybe_exchange_device": torch._C._cuda_maybeExchangeDevice,
            "_CudaDeviceProperties": native.DeviceProperties,
            "_get_device_properties": properties_of,
        },
    )


def _install_classes() -> None:
    """Puts classes in place of those that need CUDA's base classes, wherever torch offers them."""
    for name, kind in {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
    }.items():
        stand_in = renamed(kind, getattr(torch.cuda, name))
        for module in (torch.cuda, torch.cuda.streams, torch.cuda.graphs):
            if hasattr(module, name):
                setattr(module, name, stand_in)
    graphs: ModuleType = torch.cuda.graphs
    for name, value in {
        "_CUDAGraph": CUDAGraph,
        "_graph_pool_handle": CURRENT.new_pool,
        "_cuda_isCurrentStreamCapturing": lambda: CURRENT.is_capturing,
    }.items():
        if hasattr(graphs, name):
            setattr(graphs, name, value)


_PROCESSORS: Any = torch.Generator


class DeviceGenerator(_PROCESSORS):  # type: ignore[misc]  # a class of C++'s
    """A generator of the device, whose numbers are never drawn; torch.Generator itself is one of the processor.

    As in CUDAGeneratorImpl.h, its state is a seed and an offset, and a generator can take over another's.
    """

    _index: int | None
    _state: list[int]

    def __new__(cls, device: Any = "cuda") -> DeviceGenerator:
        """Returns one with torch's default seed."""
        made: DeviceGenerator = super().__new__(cls, "cpu")
        made._index = torch.device(device).index
        made._state = [_DEFAULT_SEED, 0]
        return made

    @property
    def device(self) -> torch.device:
        """Its device."""
        return torch.device("cuda", self._index if self._index is not None else ORDINALS.index)

    def manual_seed(self, seed: int) -> Self:
        """Sets the seed; the offset becomes 0."""
        self._state[:] = int(seed) % 2**64, 0
        return self

    def seed(self) -> int:
        """Sets a random seed, and returns it."""
        return self.manual_seed(secrets.randbits(53)).initial_seed()

    def initial_seed(self) -> int:
        """Returns the seed."""
        return self._state[0]

    def get_offset(self) -> int:
        """Returns the offset."""
        return self._state[1]

    def set_offset(self, offset: int) -> None:
        """Sets the offset."""
        self._state[1] = offset

    def get_state(self) -> torch.Tensor:
        """Returns seed and offset, as 16 bytes."""
        seed, offset = self._state
        values = bytearray(seed.to_bytes(8, "little") + offset.to_bytes(8, "little"))
        with torch._C._DisableTorchDispatch():  # data, whatever the default device is
            return torch.frombuffer(values, dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> Self:
        """Sets seed and offset, unless they were not computed.

        Raises:
            RuntimeError: It is no state of a generator on CUDA.
        """
        if new_state.dtype != torch.uint8 or new_state.numel() not in (8, 16):
            raise RuntimeError("RNG state is wrong size")
        if not isinstance(new_state, FakeTensor):
            with torch._C._DisableTorchDispatch():
                values = bytes(new_state.numpy())
            self._state[:] = int.from_bytes(values[:8], "little"), int.from_bytes(values[8:], "little")
        return self

    def clone_state(self) -> DeviceGenerator:
        """Returns another generator with the same seed and offset."""
        made = DeviceGenerator(self.device)
        made._state[:] = self._state
        return made

    def graphsafe_get_state(self) -> DeviceGenerator:
        """Returns a generator that shares this one's state."""
        made = DeviceGenerator(self.device)
        made._state = self._state
        return made

    def graphsafe_set_state(self, state: DeviceGenerator) -> Self:
        """Shares another generator's state."""
        self._state = state._state
        return self


class _GeneratorKind(type(torch.Generator)):  # type: ignore[misc]  # a type of C++'s
    """The type of what stands in for ``torch.Generator``."""

    def __call__(cls, device: Any = "cpu") -> Any:
        """Returns a generator of the device, or one of the processor."""
        return DeviceGenerator(device) if face.is_cuda(device) else _PROCESSORS(device)

    def __instancecheck__(cls, value: Any) -> bool:
        """Whether it is a generator."""
        return isinstance(value, _PROCESSORS)


class Generator(torch.Generator, metaclass=_GeneratorKind):
    """Stands in for ``torch.Generator``."""


def _install_numbers() -> None:
    """Puts in place what concerns random numbers, which are never drawn; torch's own functions then reach it."""
    _put(torch, {"Generator": renamed(Generator, torch.Generator)})
    generators = tuple(DeviceGenerator(torch.device("cuda", index)) for index in range(ORDINALS.count))
    _put(torch.cuda, {"default_generators": generators})


def _install_accelerator(accelerator: ModuleType) -> None:
    same = (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
        *("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    )
    answers = {name: getattr(torch.cuda, name) for name in same if hasattr(accelerator, name)}
    answers |= {
        "is_available": _yes,
        "device_count": lambda: ORDINALS.count,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: ORDINALS.index),
        **dict.fromkeys(("set_device_index", "set_device_idx"), ORDINALS.use),
        "current_stream": lambda *_: torch.cuda.current_stream(),
        "set_stream": torch.cuda.set_stream,
        "synchronize": native.nothing,
        "get_memory_info": torch.cuda.mem_get_info,
    }
    _put(accelerator, answers)
    _put(torch, {"Stream": Stream, "Event": Event})
    exchange = {
        "_accelerator_exchangeDevice": torch._C._cuda_exchangeDevice,
        "_accelerator_maybeExchangeDevice": torch._C._cuda_maybeExchangeDevice,
    }
    _put(torch._C, exchange)
