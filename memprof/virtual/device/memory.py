"""The memory of a virtual device: a caching allocator that assigns addresses without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.replay.allocator.blocks import Block
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import Settings
from memprof.trace.schema import ACTIONS
from memprof.virtual.device.current import CURRENT, ORDINALS
from memprof.virtual.device.job_history import JobHistory
from memprof.virtual.device.statistics import Statistics, memory_snapshot, out_of_memory

_ALLOC, _REQUESTED, _COMPLETED, _SEGMENT_ALLOC, _SEGMENT_FREE, _OOM = (
    ACTIONS.index(name)
    for name in ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom")
)
#: Steps of `follow` other than bytes to allocate: a free of the latest block, one of the block before it, all results
#: at once, and a release of free segments. `result_at` returns the step that allocates one of several results. A block
#: of 0 bytes takes no memory.
FREE, FREE_BELOW, RESULTS, RELEASE = -1, -(2**32), -(2**33), -(2**34)


def result_at(place: int) -> int:
    """Returns the step that allocates the result at a place."""
    return FREE - 1 - place


def copied_steps(tensor: torch.Tensor, form: torch.memory_format = torch.contiguous_format) -> list[int]:
    """Returns the step that allocates a tensor's copy in a layout; none if it has that layout."""
    return [] if tensor.is_contiguous(memory_format=form) else [tensor.numel() * tensor.element_size()]


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that identifies its storage after it is gone."""

    __slots__ = ("key",)
    key: int


class VirtualMemory:
    """Blocks for the storages of a dry run, as CUDA's caching allocator would assign them.

    Attributes:
        allocator: The allocator. When its device is full it frees its cache, and is unlimited from then on: a dry run
            reports what would be needed.
        was_used: Whether anything was ever allocated.
        is_overfull: Whether more was needed than the device's capacity.
        history: The job's own history of the allocator.
        is_strict: Whether a request that the full device cannot serve fails, instead of making the device unlimited.
        context_bytes: Memory of the device outside the allocator.
        observers: Called with device, requested bytes, capacity and free bytes when a request fails.
    """

    def __init__(self, settings: Settings, *, context_bytes: int = 0, is_strict: bool = False) -> None:
        """Starts with nothing reserved."""
        self.is_strict = is_strict
        self.context_bytes = context_bytes
        self.allocator = CachingAllocator(settings)
        self.was_used = False
        self.is_overfull = False
        self.history = JobHistory()
        self.on_change: Callable[[int], None] | None = None
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self._blocks: dict[int, tuple[_Reference, Block]] = {}
        self._emptied: dict[int, _Reference] = {}
        self._kept: list[Block] = []
        self._raw: dict[int, Block] = {}
        self._statistics = Statistics(self.allocator)
        self._log: RawLog | None = None
        self._logged_segments = 0
        self._number = -1

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments now."""
        return self.allocator.reserved

    def hold(self, tensor: torch.Tensor) -> None:
        """Assigns a block to a tensor's storage, unless it has one of that size; it is freed with the storage."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._blocks.get(key)
        if known is not None:
            if known[1].requested == size:
                return
            self.give(self._blocks.pop(key)[1])  # it was resized
        if size:
            reference = _Reference(storage, self._died)
            reference.key = key
            self._blocks[key] = (reference, self.take(size))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Moves a tensor's block to another tensor of the same size that has none."""
        held = self._blocks.get(source.untyped_storage()._cdata)
        storage = target.untyped_storage()
        if held is None or storage._cdata in self._blocks or held[1].requested != storage.nbytes():
            return
        del self._blocks[source.untyped_storage()._cdata]
        reference = _Reference(storage, self._died)
        reference.key = storage._cdata
        self._blocks[reference.key] = (reference, held[1])

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Replaces the block of a storage resized outside any operator; one of 0 bytes has none."""
        key, size = storage._cdata, storage.nbytes()
        known = self._blocks.pop(key, None)
        if known is not None:
            self.give(known[1])
        reference = known[0] if known is not None else self._emptied.pop(key, None)
        if reference is None or reference() is not storage:
            return
        if size:
            self._blocks[key] = (reference, self.take(size))
        else:
            self._emptied[key] = reference

    def keep(self, size: int) -> None:
        """Allocates a block for good, such as a library's workspace."""
        self._kept.append(self.take(size))

    def pass_through(self, sizes: list[int]) -> None:
        """Allocates all blocks, then frees them in reverse order, like a kernel's temporary memory."""
        taken: list[Block] = []
        try:
            taken.extend(self.take(size) for size in sizes if size)  # keeps those before one that fails
        finally:
            for block in reversed(taken):
                self.give(block)

    def follow(self, steps: list[int], hold: Callable[[int | None], object]) -> None:
        """Allocates and frees in the order of a kernel's steps; at the end frees what is left, the latest first.

        Args:
            steps: Bytes to allocate; FREE frees the latest block, FREE_BELOW the one before it; RESULTS allocates the
                kernel's results, RELEASE releases free segments.
            hold: Allocates the result at a place, or all.
        """
        taken: list[Block | None] = []
        try:
            for step in steps:
                if step == RESULTS:
                    hold(None)
                elif step == RELEASE:
                    self.empty_cache()
                elif step in (FREE, FREE_BELOW):
                    block = taken.pop(-1 if step == FREE else -2)
                    if block is not None:
                        self.give(block)
                elif step < FREE:
                    hold(FREE - 1 - step)
                else:
                    taken.append(self.take(step) if step else None)
        finally:
            for block in reversed(taken):
                if block is not None:
                    self.give(block)

    def take(self, size: int) -> Block:
        """Allocates a block of at least `size` bytes.

        Raises:
            torch.OutOfMemoryError: The device is full, and strict.
        """
        block = self.allocator.allocate(size, owner=CURRENT.owner)
        if block is None and self.is_strict:
            self._log_segments()
            self._write(_OOM, self.allocator.free_on_device, size, 0)
            self.history.is_failing = True
            try:
                raise out_of_memory(self.allocator, size, self.context_bytes, self.observers)
            finally:
                self.history.is_failing = False
        if block is None:  # a real job would end here; the dry run continues, to report what would be needed
            self.is_overfull = True
            self.allocator.settings = replace(self.allocator.settings, capacity_bytes=None, limit_bytes=None)
            block = self.allocator.allocate(size, owner=CURRENT.owner)
            assert block is not None  # the device is unlimited by now
        self._log_segments()
        self.history.took(block.address, size)
        self._change(block, 1)
        self._write(_ALLOC, block.address, size, block.size)
        return block

    def give(self, block: Block) -> None:
        """Frees a block."""
        address, requested, size = block.address, block.requested, block.size
        self.history.gave(address, requested)
        self._change(block, -1)
        self.allocator.request_free(block)
        self.allocator.complete_free(block)
        self._write(_REQUESTED, address, requested, -size)
        self._write(_COMPLETED, address, requested, 0)

    def take_raw(self, size: int) -> int:
        """Allocates a block without a storage, and returns its address; 0 for no bytes."""
        if not size:
            return 0
        block = self.take(size)
        self._raw[block.address] = block
        return block.address

    def give_raw(self, address: int) -> None:
        """Frees a block of `take_raw`; address 0 is none.

        Raises:
            RuntimeError: There is none at this address.
        """
        if not address:
            return
        if address not in self._raw:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        self.give(self._raw.pop(address))

    def span(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Returns a storage's address and bytes; (0, 0) if it has no block."""
        known = self._blocks.get(storage._cdata)
        return (known[1].address, known[1].requested) if known is not None else (0, 0)

    def empty_cache(self) -> None:
        """Releases every segment that is completely free."""
        self.allocator.release_cached()
        self._log_segments()

    def reset_peak(self) -> None:
        """Resets the peaks, at the job's request."""
        self._statistics.reset_peak()

    def stats(self) -> dict[str, Any]:
        """Returns the counters of ``torch._C._cuda_memoryStats``; a counter that is not kept is 0."""
        return self._statistics.as_dict()

    def reset_accumulated(self) -> None:
        """Resets the sums of what was allocated and freed, at the job's request."""
        self._statistics.reset_accumulated()

    def set_fraction(self, share: float) -> None:
        """Limits the process to a share of the device's memory, from now on."""
        settings = self.allocator.settings
        if settings.capacity_bytes is not None:
            limit = int(share * settings.capacity_bytes)
            self.allocator.settings = replace(settings, limit_bytes=limit if share < 1 else None)

    def snapshot(self) -> dict[str, Any]:
        """Returns the current segments with their blocks, in the form of ``torch._C._cuda_memorySnapshot``."""
        return self.history.fill(memory_snapshot(self.allocator))

    def log_to(self, log: RawLog | None) -> None:
        """Logs everything from now on; stops logging if `log` is None.

        Blocks in use are logged first.
        """
        self._log = log
        self._logged_segments = len(self.allocator.log)
        if log is None:
            return
        self._number = log.intern("devices", self.device)
        now = clock_ns()
        for block in [*self._kept, *self._raw.values(), *(block for _, block in self._blocks.values())]:
            log.device_alive.extend((now, self._number, block.address, block.size, block.requested, 0, 0))

    @property
    def device(self) -> str:
        """Its name in recordings, such as ``cuda:0``."""
        return str(ORDINALS.current())

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        if self._emptied.get(reference.key) is reference:
            del self._emptied[reference.key]
        known = self._blocks.get(reference.key)
        if known is not None and known[0] is reference:
            del self._blocks[reference.key]
            self.give(known[1])

    def _change(self, block: Block, sign: int) -> None:
        self._statistics.change(block, sign)
        self.was_used = True
        ORDINALS.is_fixed = True

    def _write(self, action: int, address: int, requested: int, change: int) -> None:
        log = self._log
        if log is None:
            return
        if change and self.on_change is not None:
            self.on_change(change)
        now = clock_ns()
        log.history.extend((now // 1000, self._number, action, address, requested, 0, 0))
        if change:
            allocated = self._statistics.allocated_bytes
            log.device_events.extend((now, self._number, address, change, allocated, self.reserved_bytes))

    def _log_segments(self) -> None:
        log, self._logged_segments, first = self._log, len(self.allocator.log), self._logged_segments
        now = clock_ns() // 1000
        for event in self.allocator.log[first:]:
            self.history.segment(event.action, event.address, event.size)
            if log is None:
                continue
            action = _SEGMENT_ALLOC if event.action in ("segment_alloc", "segment_map") else _SEGMENT_FREE
            log.history.extend((now, self._number, action, event.address, event.size, 0, 0))
