"""Turns a job into a dry run: from the first model on, it uses fake tensors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.compiled.uncompiled import trace_initializer
from memprof.recorder.machine import is_loader_worker
from memprof.recorder.profiler.native import NativeEvents
from memprof.trace.files.spool import DRY_RUN
from memprof.virtual.compiling.virtual_compiler import after_first, is_update
from memprof.virtual.engine import extension as transformer_engine
from memprof.virtual.pools import follow_pools, load_real_data
from memprof.virtual.ranks.dry_rank import DryRank
from memprof.virtual.refusals import refuse_missing_device
from memprof.virtual.repeats.whole import Whole
from memprof.virtual.tensors.fakes import dry_outside_span, dry_owned_span, dry_span, dry_storage_span
from memprof.virtual.tensors.files import Files
from memprof.virtual.tensors.subclasses import hide_fakes
from memprof.virtual.tensors.tensor_files import pickle_shapes
from memprof.virtual.values.answers import Answers
from memprof.virtual.values.loops import end_updates
from memprof.virtual.values.recorded import RecordedValues

if TYPE_CHECKING:
    from memprof.recorder.calls.operator_rows import OperatorRows
    from memprof.recorder.log import RawLog
    from memprof.recorder.memory.inventory import Inventory
    from memprof.recorder.operators import OperatorMode
    from memprof.recorder.profiler.sources import MemorySources
    from memprof.recorder.steps.usages import Usages
    from memprof.virtual.compiling.compiled_regions import CompiledRegions
    from memprof.virtual.device.virtual_device import VirtualDevice
    from memprof.virtual.mode import DryMode
    from memprof.virtual.sizes.kernel_probe import Kernels
    from memprof.virtual.sizes.routing import Routing

#: torch's own modules that also compile functions in an eager job: cond, scan and the like.
_COMPILING = ("torch._higher_order_ops.", "torch.nn.attention.")
#: Replaces the address of a kernel's temporary memory.
_KERNEL = 1

#: Modules that are imported only when a dry run begins.
_LAZY = (
    "memprof.machines.card",
    "memprof.policies.allocator.policy",
    "memprof.virtual.compiling.compiled_regions",
    "memprof.virtual.device.virtual_device",
    "memprof.virtual.mode",
    "memprof.virtual.tensors.outside_operators",
    "memprof.virtual.ranks.objects",
    "memprof.virtual.sizes.routing",
    "memprof.virtual.tensors.subclasses",
    "torch.testing._internal.distributed.fake_pg",
)


class DryRun:
    """The dry run of this process: it begins when the job creates its first model or optimizer.

    With a virtual device, everything that the job places on the device is fake from the beginning.

    Its patches to torch are permanent: the process ends with the dry run.

    Attributes:
        rank: This process as a rank of its job.
    """

    def __init__(
        self,
        refuse: Callable[[str], NoReturn],
        spool: Path,
        device: VirtualDevice | None = None,
        *,
        is_given_rank: bool = False,
        expert_load: float = 1.0,
        is_whole: bool = False,
    ) -> None:
        """Changes nothing yet.

        Args:
            refuse: Ends the job with a message, which the parent prints.
            spool: The recording's spool folder, through which ranks exchange the values that sizes depend on.
            device: The virtual device; None if the job runs on the machine's processor.
            is_given_rank: Whether the parent starts each rank, with its number in the environment.
            expert_load: Tokens that a rank's experts receive, as a multiple of their equal share.
            is_whole: The whole loop is run, and what repeats is skipped.
        """
        self._answers = Answers(RecordedValues.read(spool), refuse)
        self._routing: Routing | None = None
        self._expert_load = expert_load
        self._whole = Whole() if is_whole else None
        self._device = device
        self._refuse = refuse
        self._mode: DryMode | None = None
        self._kernels: Kernels | None = None
        self._regions: CompiledRegions | None = None
        self._sources: MemorySources | None = None
        self._files = Files(self._answers.count_left_out, refuse, self._is_begun)
        self._has_compiled = False
        self._pid = os.getpid()
        self.rank = DryRank(
            spool, refuse, self._answers.count_left_out, is_given=is_given_rank, is_on_device=device is not None
        )

    @property
    def answers(self) -> Answers:
        """Supplies what the job reads: values of a recording, and placeholders."""
        return self._answers

    def install(self) -> None:
        """Waits for the first model."""
        self._files.install()
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            self._begin_at(owner)
        if self._device is not None:
            self._begin()
            transformer_engine.install(self._refuse)
        else:
            refuse_missing_device(self._refuse)
            self._note_compiled()
        self.rank.install()

    def adopt(
        self,
        mode: OperatorMode,
        rows: OperatorRows,
        inventory: Inventory,
        sources: MemorySources,
        log: RawLog,
        usages: Usages,
    ) -> None:
        """Adapts the components of a recording to fake tensors."""
        from torch._subclasses.fake_tensor import FakeTensor

        device = self._device
        mode.fake_type = FakeTensor
        if self._whole is not None and device is None:
            sources.on_change = self._whole.meter.change
        elif self._whole is not None and device is not None:
            device.memory.on_change = self._whole.meter.change
        self._sources = sources
        if self._regions is not None:
            self._regions.adopt(mode, rows, sources, usages)
        if device is None:
            mode.rows.span = dry_span
            inventory.storage_span, inventory.owned_span = dry_storage_span, dry_owned_span
            inventory.outside.owned_span = dry_outside_span
            sources.follow_only(DRY_RUN, dry_owned_span)
        else:
            mode.rows.span = device.span
            inventory.storage_span, inventory.owned_span = device.storage_span, device.owned_span
            sources.follow_device(DRY_RUN, device.events(log))

    def postpones_end(self, end: Callable[[], None]) -> bool:
        """Returns whether the job goes on after its recording, to take its own snapshots; `end` is called then."""
        return self._device is not None and self._device.postpones_end(end)

    def around(self, log: RawLog, after_operator: Callable[[int, bool], None]) -> Callable[[int, bool], None]:
        """Wraps the callback after each operator: the kernel's temporary memory is logged first."""

        def note(now_ns: int, is_backward: bool) -> None:
            extra = self._mode.extra_bytes if self._mode is not None else 0
            if extra:
                # The result is already allocated: the logged peak is the sum of both.
                log.events.extend((now_ns, _KERNEL, extra, -1, now_ns, _KERNEL, -extra, -1))
                if self._whole is not None:
                    self._whole.meter.pulse(extra)
            after_operator(now_ns, is_backward)

        return note

    def begin_step(self, step: int) -> None:
        """Notes that a step begins."""
        if self._whole is not None:
            self._whole.begin_step(step)

    def is_over(self) -> bool:
        """Whether the whole loop was run for as long as it may be."""
        return self._whole is not None and self._whole.is_over()

    def notes(self) -> list[str]:
        """Returns notes on the dry run for the reader of the trace."""
        sparse = self._mode.sparse if self._mode is not None else None
        found = [
            part.notes()
            for part in (self._whole, self._answers, self._kernels, sparse, self._regions, self._device, self._routing)
            if part is not None
        ]
        return [note for notes in found for note in notes]

    def needs(self) -> Iterable[dict[str, Any]]:
        """Returns what the job pins on the host, for `memprof.trace.schema.HostNeeds`."""
        return () if self._device is None else self._device.pinned.needs()

    def _is_begun(self) -> bool:
        return self._mode is not None and self._mode.is_begun

    def _begin_at(self, owner: Any) -> None:
        original = owner.__init__

        @wraps(original)
        def begin(this: Any, *args: Any, **kwargs: Any) -> None:
            owner.__init__ = original
            trace_initializer(begin, original)
            self.begin()
            original(this, *args, **kwargs)

        owner.__init__ = begin

    def begin(self) -> None:
        """Computes nothing from now on: a model, an optimizer or a backward comes."""
        self._begin()
        if self._mode is not None:
            self._mode.is_begun = True

    def _begin(self) -> None:
        if self._mode is not None or os.getpid() != self._pid or is_loader_worker():
            return  # already begun, or in a data loader's worker, forked or not
        if threading.current_thread() is not threading.main_thread():
            return
        # Lazy: the import takes a second, and a process of the job that creates no model does not need it.
        from memprof.virtual.compiling.compiled_regions import CompiledRegions
        from memprof.virtual.mode import DryMode, lent
        from memprof.virtual.sizes.kernel_probe import Kernels
        from memprof.virtual.sizes.routing import Routing
        from memprof.virtual.tensors.outside_operators import (
            accept_fakes,
            answer_conversions,
            follow_memory,
            show_no_values,
        )
        from memprof.virtual.tensors.subclasses import allow_subclasses, let_data_be_assigned

        allow_subclasses()
        self._kernels = Kernels()
        self._routing = Routing(self._expert_load)
        self._mode = DryMode(self._answers, self._kernels, self._refuse, self._device, self.rank.role, self._routing)
        if self._whole is not None:
            self._whole.install(self._mode, self._noticed)
        self._regions = CompiledRegions(
            self._mode, self._refuse, is_virtual=self._device is not None, is_whole=self._whole is not None
        )
        if self._has_compiled and not self._regions.prepare(None):
            self._refuse(f"functions compiled before the first model cannot be dry-run with torch {torch.__version__}.")
        if self._device is not None:
            self._device.install(self._mode, self._answers.count_left_out)
        else:
            NativeEvents.initialize()  # kernels are tried under torch's profiler
        let_data_be_assigned(lent, self._mode)
        answer_conversions(self._answers, self._mode)
        self._mode.__enter__()
        os.register_at_fork(after_in_child=self._leave)
        show_no_values(self._answers, dry_span if self._device is None else self._device.span)
        follow_memory(self._noticed, self._resized)
        accept_fakes()
        hide_fakes()
        pickle_shapes()  # tensors go to a data loader's worker and back
        load_real_data(self._leave)
        self._leave_out()
        follow_pools(nullcontext() if self._device is None else self._device.calls)

    def _note_compiled(self) -> None:
        """Notes that the job compiles before its first model: what it compiles is then run on fake tensors, too."""
        torch_module: Any = torch
        compile_for_real = torch_module.compile

        @wraps(compile_for_real)
        def compile_early(*args: Any, **settings: Any) -> Any:
            self._has_compiled |= not sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILING)
            return compile_for_real(*args, **settings)

        torch_module.compile = compile_early

    def _leave(self) -> None:
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if self._device is not None:
            self._device.leave()

    def _noticed(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that no operator returns."""
        sources = self._sources
        if sources is not None and sources.is_open and sources.on_output is not None:
            sources.on_output(tensor, clock_ns())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if self._device is not None:
            self._device.memory.resized(storage)
        elif self._sources is not None:
            self._sources.resized(storage)

    def _leave_out(self) -> None:
        """Disables what is meaningless without values."""
        torch_module: Any = torch
        compile_for_real = torch_module.compile

        @wraps(compile_for_real)
        def compile_dry(model: Any = None, **settings: Any) -> Any:
            is_own = sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILING)
            if is_own or (self._regions is not None and self._regions.prepare(model)):
                compiled = compile_for_real(model, **settings)
                return after_first(model, compiled) if is_update(model) else compiled
            return model if model is not None else lambda function: function

        torch_module.save = self._files.save
        torch_module.compile = compile_dry

        if self._answers.recorded.are_there:
            return  # updates end as they did
        left_out = "LBFGS' line searches, which end by values, stopped at their first trial"
        end_updates(self._answers.falling, partial(self._answers.count_left_out, left_out))


def import_all() -> None:
    """Imports what every rank needs before ranks are forked from this process, which takes a second."""
    for name in _LAZY:
        import_module(name)
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode()  # imports the rest
