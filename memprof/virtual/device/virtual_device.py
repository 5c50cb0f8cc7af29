"""The device of a dry run: its view for the job, its kernels' memory, and its report to a recording."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.machines.card import Card
from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.clock import clock_ns
from memprof.recorder.device_history import segment_records
from memprof.recorder.log import RawLog
from memprof.recorder.memory.tensor_memory import parts_of
from memprof.replay.allocator.rules import settings_from_options
from memprof.trace.files.spool import UNUSED_DEVICE
from memprof.virtual.cudnn.answers import Answers
from memprof.virtual.device import cuda, face
from memprof.virtual.device.autocast import Casts
from memprof.virtual.device.calls import DeviceCalls
from memprof.virtual.device.current import CURRENT, ORDINALS
from memprof.virtual.device.job_snapshots import JobSnapshots, SnapshotRequest
from memprof.virtual.device.kernels import triton_launches
from memprof.virtual.device.kernels.attention import masked_in_place
from memprof.virtual.device.kernels.convolved import LAYOUTS
from memprof.virtual.device.kernels.cuda_kernels import DeviceKernels
from memprof.virtual.device.kernels.formats import low_bit_shape, sizes_before, sizes_within
from memprof.virtual.device.kernels.operator_rules import (
    GROUPED,
    LOSSES,
    FusedKernels,
    GradientSums,
    biased_in_place,
    in_order,
)
from memprof.virtual.device.kernels.operator_rules import SHAPES as TYPED_PRODUCTS
from memprof.virtual.device.kernels.recurrent import SHAPES as RECURRENT_SHAPES
from memprof.virtual.device.memory import VirtualMemory
from memprof.virtual.device.pinned import PinnedMemory
from memprof.virtual.tensors.fakes import dry_storage_span

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    from memprof.recorder.log import RawLog

_TO_COPY = torch.ops.aten._to_copy.default


class VirtualDevice:
    """A CUDA device that does not exist.

    Attributes:
        card: Its properties.
        memory: Its memory.
        pinned: What the job pins on the host.
    """

    def __init__(
        self, card: Card, options: dict[str, str], request: SnapshotRequest | None = None, *, is_strict: bool = False
    ) -> None:
        """Changes nothing yet.

        Args:
            card: Properties of the device.
            options: Options of its allocator, as in ``PYTORCH_ALLOC_CONF``.
            request: Where the job's own snapshots are collected; None to write them where the job says.
            is_strict: Whether requests beyond its capacity fail, as on a real one.
        """
        self.card = card
        room = card.capacity_bytes - card.context_bytes
        settings = settings_from_options(options, capacity_bytes=room)
        self.memory = VirtualMemory(settings, context_bytes=card.context_bytes, is_strict=is_strict)
        self.pinned = PinnedMemory(options)
        self._request = request
        self._snapshots: JobSnapshots | None = None
        self._answers = Answers.find(card, torch.__version__)
        self._kernels = DeviceKernels(card.architecture, self.memory, card.machine.multiprocessors, self._answers)
        self._casts = Casts()
        self._fused = FusedKernels()
        self._sums = GradientSums()
        self._calls: DeviceCalls | None = None

    def install(self, mode: TorchDispatchMode, count_left_out: Callable[[str], None]) -> None:
        """Makes the device visible to the job from now on."""
        face.install()
        self._snapshots = JobSnapshots(self.memory.history, self.card.machine.name, count_left_out, self._request)
        cuda.install(self.card, self.memory, self._snapshots)
        self._casts.install()
        self._fused.install()
        self._calls = DeviceCalls(self.card.architecture, mode, self._snapshots.end_if_complete, self.pinned)
        self._calls.install()

    @property
    def calls(self) -> AbstractContextManager[Any]:
        """What a thread enters to see the device, nothing before it is installed."""
        return nullcontext() if self._calls is None else self._calls

    def leave(self) -> None:
        """Hides the device in a forked child: it loads data."""
        stack = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        for mode in reversed(stack):
            if mode is not self._calls:
                torch._C._push_on_torch_function_stack(mode)

    def postpones_end(self, end: Callable[[], None]) -> bool:
        """Returns whether the job goes on after its recording, to take its own snapshots; `end` is called then."""
        return self._snapshots is not None and self._snapshots.postpones(end)

    @staticmethod
    def answer(tensor: Any) -> torch.device:
        """Returns a tensor's device for torch's C++ side."""
        return face.answer_device(tensor)

    @staticmethod
    def placed(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns an operator's keyword arguments as Python sees them, and whether they name the device."""
        device = kwargs.get("device")
        is_placed = device is not None and face.is_cuda(device)
        return (face.up(kwargs) if is_placed else kwargs), is_placed

    def shape_of(self, func: Any) -> Callable[..., Any] | None:
        """Returns the shape function of an operator, if torch has none."""
        for shapes in (RECURRENT_SHAPES, LOSSES, GROUPED, TYPED_PRODUCTS, LAYOUTS):
            if func in shapes:
                return shapes[func]
        return low_bit_shape(func)

    def after(self, func: Any, args: Any, kwargs: Any, result: Any, processor_bytes: int | None = None) -> None:
        """Assigns blocks to an operator's results, and temporary memory to its kernel.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: Its result.
            processor_bytes: What the processor's kernel of an operator on sparse tensors takes; None for others.
        """
        self.memory.history.operator = func
        # torch pins what it copies to the processor without waiting (_to_copy, TensorConversions.cpp).
        is_copied = func is _TO_COPY and kwargs.get("non_blocking") and face.is_on_device(args[0])
        if (is_copied or kwargs.get("pin_memory")) and not face.is_on_device(result):
            self.pinned.pin(result)
        if processor_bytes is not None:
            self._after_sparse(func, args, result, processor_bytes)
            self.memory.history.operator = None
            return
        reads = any(face.is_on_device(value) for value in tensors_in(args))
        reused = None
        if reads:
            reused = biased_in_place(func, args, result)
            reused = masked_in_place(func, args, result) if reused is None else reused
            reused = self._sums.reused(func, args, result) if reused is None else reused
        if reused is not None:
            self.memory.move(reused, result)
        steps = self._kernels.steps(func, args, result) if reads else None
        if steps is not None:
            self.memory.follow(steps, lambda place: self._hold(result if place is None else result[place], reads=True))
        elif self._hold(in_order(func, args, result), reads=reads) or reads:
            self._kernels.run(func, args, result, kwargs)
        self.memory.history.operator = None

    def _after_sparse(self, func: Any, args: Any, result: Any, processor_bytes: int) -> None:
        reads = any(face.is_on_device(value) for value in tensors_in(args))
        if reads:
            self.memory.pass_through(sizes_before(func, args))
        if self._hold(result, reads=reads) and reads:
            for sizes in sizes_within(func, args, result, processor_bytes):
                self.memory.pass_through(sizes)

    def span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns a tensor's address on the device and its own bytes; elsewhere a number unique among storages."""
        if tensor.layout is not torch.strided:
            return 0, 0
        if face.is_on_device(tensor):
            return self._storage_span(tensor)[0], tensor.nbytes
        return dry_storage_span(tensor)[0], tensor.nbytes

    def storage_span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns address and bytes of a tensor's storage."""
        return self._storage_span(tensor) if face.is_on_device(tensor) else dry_storage_span(tensor)

    def owned_span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The same for storages on the device; (0, 0) elsewhere."""
        return self._storage_span(tensor) if face.is_on_device(tensor) else (0, 0)

    def events(self, log: RawLog) -> VirtualEvents:
        """Returns the component that reports the device to a recording."""
        return VirtualEvents(log, self.memory, self.card, self._answers, self.pinned)

    def notes(self) -> list[str]:
        """Returns notes on the device for the reader of the trace."""
        if not self.memory.was_used:
            return [f"{UNUSED_DEVICE} ({self.card.machine.name}): move its model there, or dry-run it without --device"]
        notes = [self.card.note(), *self._kernels.notes(), *triton_launches.notes()]
        if CURRENT.captures:
            notes.append(
                f"CUDA graphs captured: {CURRENT.captures}. What replays use stays reserved in the graphs' pools; what "
                "the driver takes for the graphs themselves is not counted"
            )
        if not self.memory.is_overfull and self.memory.allocator.retries:
            times = self.memory.allocator.retries
            notes.append(f"the device was full {times:,} times: the allocator released its cache, which takes time")
        return notes

    def _storage_span(self, tensor: torch.Tensor) -> tuple[int, int]:
        try:
            return self.memory.span(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            return 0, 0  # sparse and opaque tensors

    def _hold(self, result: Any, *, reads: bool) -> bool:
        """Assigns blocks to results on the device; returns whether there are any."""
        is_here = False
        for tensor in tensors_in(result):
            if not isinstance(tensor, FakeTensor):
                continue
            if tensor.layout is not torch.strided:
                is_here = self._hold(list(parts_of(tensor)), reads=False) or is_here
                continue
            if reads and tensor.fake_device.type == "meta":
                tensor.fake_device = ORDINALS.current()  # seeds, whose device torch cannot infer
            if tensor.fake_device.type == "cuda" and tensor.layout is torch.strided:
                is_here = True
                self.memory.hold(tensor)
        return is_here


class VirtualEvents:
    """Replaces the allocator's history and the driver's samples (`recorder.sources`)."""

    def __init__(self, log: RawLog, memory: VirtualMemory, card: Card, answers: Answers, pinned: PinnedMemory) -> None:
        """Stores the components; logs nothing yet.

        Args:
            log: Destination of the rows.
            memory: The device's memory.
            card: Properties of the device.
            answers: What is asked for workspaces.
            pinned: What the job pins on the host.
        """
        self._pinned = pinned
        self.is_running = False
        self._log = log
        self._memory = memory
        self._card = card
        self._answers = answers
        self._described: str | None = None

    def start(self) -> bool:
        """Logs the blocks in use, and everything from now on."""
        if not self.is_running:
            self._memory.log_to(self._log)
            self.is_running = True
        return True

    def cut(self) -> None:
        """Does nothing: everything is logged as it happens."""

    def stop(self) -> None:
        """Logs the current segments, and stops."""
        if self.is_running:
            segments = segment_records(self._memory.snapshot()["segments"])
            self._log.record("segments", {"time_ns": clock_ns(), "segments": segments})
            self.abandon()

    def abandon(self) -> None:
        """Stops without logging."""
        self.is_running = False
        self._memory.log_to(None)

    def sample(self) -> None:
        """Logs the memory use of the whole device; describes it the first time, and again where cuDNN failed since."""
        log, card, memory = self._log, self._card, self._memory
        if self._described != self._answers.name:
            self._described = self._answers.name
            log.record("device", {**card.describe(memory.device), "cudnn": self._described})
        reserved = memory.reserved_bytes
        used = reserved + card.context_bytes
        number = log.intern("devices", memory.device)
        log.device_memory.extend(
            (clock_ns(), number, card.capacity_bytes, used, used, reserved, self._pinned.total_bytes)
        )
