"""Implements `torch.cuda` and `torch.accelerator` for the device of a dry run; counters come from its allocator."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.machines.card import Card
from memprof.recorder.dry.device.face import CUDA
from memprof.recorder.dry.device.memory import VirtualMemory

_KINDS = {"allocated_bytes": "allocated", "active_bytes": "active", "reserved_bytes": "reserved"}
#: Version of cuDNN reported to a job; torch's choice of attention kernels depends on it (architectures.toml).
_CUDNN_VERSION = 91_501


class VirtualStream:
    """A stream that runs nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepts the arguments of CUDA's."""
        self.device, self.cuda_stream, self.stream_id, self.device_index = CUDA, 0, 0, 0

    def synchronize(self) -> None:
        """Returns at once."""

    def wait_stream(self, stream: Any) -> None:
        """Returns at once."""

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Returns False: no graph is captured."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Returns the event, recorded."""
        event = event or VirtualEvent()
        event.record()
        return event

    def __enter__(self) -> VirtualStream:
        """Does nothing: this already is the current stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: this stays the current stream."""


class VirtualEvent:
    """An event, recorded when the job's Python reaches it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepts the arguments of CUDA's."""
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Stores the current time."""
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Returns at once."""

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def elapsed_time(self, other: VirtualEvent) -> float:
        """Returns the milliseconds between two times of the dry run, which are not device times."""
        return max((other._recorded_s - self._recorded_s) * 1e3, 1e-3)


def install(card: Card, memory: VirtualMemory, count_left_out: Callable[[str], None]) -> None:
    """Patches torch with this implementation.

    Args:
        card: Properties of the device.
        memory: Its memory.
        count_left_out: Called for each action that a dry run omits.
    """
    _put(torch.cuda, _about_device(card) | _about_memory(card, memory) | _about_time() | _about_numbers())
    _put(torch.cuda.memory, _about_memory(card, memory) | _about_history(count_left_out))
    _put(torch.cuda, {"_initialized": True, "CUDAGraph": _no_graphs, "graph": _no_graphs})
    _put(torch.cuda.random, _about_numbers())
    _put(torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False})
    _put(torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), _nothing))
    importlib.import_module("torch.utils.flop_counter")  # warns about components that a CUDA build would include
    _put(torch.version, {"cuda": torch.version.cuda or "13.0"})
    cudnn = {"is_available": _yes, "version": lambda: _CUDNN_VERSION, "is_acceptable": lambda tensor: tensor.is_cuda}
    _put(torch.backends.cudnn, cudnn)
    _put(torch, {"_use_cudnn_rnn_flatten_weight": _no})  # weights stay separate: their bytes are the same
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        _put(accelerator, _about_accelerator(card, memory))
    generator: Any = torch.Generator

    class Generator(generator):  # type: ignore[misc]  # a class of C++'s
        """A generator for the device; its numbers are never drawn."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return generator.__new__(cls, "cpu")

    _put(torch, {"Generator": Generator})


def _put(owner: Any, answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        setattr(owner, name, answer)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_graphs(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "CUDA graphs cannot be dry-run: no device captures them. Dry-run the job without them; graphs "
        "keep what they use in a pool of their own."
    )


def _about_device(card: Card) -> dict[str, Any]:
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.capacity_bytes,
        multi_processor_count=108,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        L2_cache_size=0,
        gcnArchName="",
        uuid="",
    )

    @contextlib.contextmanager
    def device(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return {
        "is_available": _yes,
        "is_initialized": _yes,
        "_is_compiled": _yes,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _only_first,
        "device": device,
        "device_of": device,
        "_exchange_device": lambda _index: 0,
        "_maybe_exchange_device": lambda _index: 0,
        "get_device_name": lambda *_: card.name,
        "get_device_capability": lambda *_: card.capability,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": lambda *_, **__: major >= 8,
        "can_device_access_peer": _no,
        "get_allocator_backend": lambda: "native",
        "is_current_stream_capturing": _no,
        "ipc_collect": _nothing,
    }


def _only_first(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index:
        raise RuntimeError("CUDA error: invalid device ordinal")


def _about_memory(card: Card, memory: VirtualMemory) -> dict[str, Any]:
    def now(kind: str) -> Callable[..., int]:
        return lambda *_, **__: memory.current[kind]

    def highest(kind: str) -> Callable[..., int]:
        return lambda *_, **__: memory.peak[kind]

    def stats(*_: Any, **__: Any) -> dict[str, int]:
        told = {}
        for kind in (*_KINDS, "requested_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                is_all = pool == "all"
                told[f"{kind}.{pool}.current"] = memory.current[kind] if is_all else 0
                told[f"{kind}.{pool}.peak"] = memory.peak[kind] if is_all else 0
                told[f"{kind}.{pool}.allocated"] = told[f"{kind}.{pool}.freed"] = 0
        return told | {"num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}

    def summary(*_: Any, **__: Any) -> str:
        return "\n".join(f"{kind}: {memory.current[kind]:,} (at most {memory.peak[kind]:,})" for kind in _KINDS)

    def info(*_: Any) -> tuple[int, int]:
        used = memory.current["reserved_bytes"] + card.context_bytes
        return max(card.capacity_bytes - used, 0), card.capacity_bytes

    return {
        "memory_allocated": now("allocated_bytes"),
        "max_memory_allocated": highest("allocated_bytes"),
        "memory_reserved": now("reserved_bytes"),
        "max_memory_reserved": highest("reserved_bytes"),
        "memory_cached": now("reserved_bytes"),
        "max_memory_cached": highest("reserved_bytes"),
        "memory_stats": stats,
        "memory_summary": summary,
        "mem_get_info": info,
        "empty_cache": memory.empty_cache,
        "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
        "reset_max_memory_allocated": lambda *_: memory.reset_peak(),
        "reset_accumulated_memory_stats": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "utilization": lambda *_: 0,
    }


def _about_history(count_left_out: Callable[[str], None]) -> dict[str, Any]:
    def leave_out(*_: Any, **__: Any) -> None:
        count_left_out("the job's own history of the allocator was omitted")

    return {"_record_memory_history": leave_out, "_dump_snapshot": leave_out}


def _about_time() -> dict[str, Any]:
    stream = VirtualStream()

    @contextlib.contextmanager
    def on_stream(_stream: Any) -> Iterator[None]:
        yield

    return {
        "Stream": VirtualStream,
        "ExternalStream": VirtualStream,
        "Event": VirtualEvent,
        "synchronize": _nothing,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": _nothing,
        "stream": on_stream,
    }


def _about_numbers() -> dict[str, Any]:
    def state(*_: Any) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return torch.zeros(16, dtype=torch.uint8)

    return {
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed": _nothing,
        "seed_all": _nothing,
        "initial_seed": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
    }


def _about_accelerator(card: Card, memory: VirtualMemory) -> dict[str, Any]:
    told = _about_memory(card, memory)
    same = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats")
    return {
        **{name: told[name] for name in same},
        "empty_cache": memory.empty_cache,
        "reset_peak_memory_stats": told["reset_peak_memory_stats"],
        "is_available": _yes,
        "device_count": lambda: 1,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _only_first,
        "set_device_idx": _only_first,
        "current_stream": lambda *_: VirtualStream(),
        "set_stream": _nothing,
        "synchronize": _nothing,
    }
