"""Turns a job into a dry run: from the first model on, it uses fake tensors."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from memprof.recorder.clock import clock_ns
from memprof.recorder.compiled.uncompiled import trace_initializer
from memprof.recorder.dry.answers import Answers
from memprof.recorder.dry.compiling.compiled_updates import after_first, is_update
from memprof.recorder.dry.fakes import dry_outside_span, dry_owned_span, dry_span, dry_storage_span
from memprof.recorder.dry.files import Files
from memprof.recorder.dry.pools import follow_pools, load_real_data
from memprof.recorder.dry.ranks.dry_rank import DryRank
from memprof.recorder.dry.refusals import refuse_missing_device
from memprof.recorder.dry.subclasses import hide_fakes
from memprof.recorder.dry.tensor_files import outside_dry_run, pickle_shapes
from memprof.recorder.dry.values.loops import end_updates
from memprof.recorder.dry.values.recorded import RecordedValues
from memprof.recorder.machine import is_loader_worker
from memprof.recorder.profiler.native import NativeEvents
from memprof.trace.files.spool import DRY_RUN

if TYPE_CHECKING:
    from memprof.recorder.calls.operator_rows import OperatorRows
    from memprof.recorder.dry.compiling.compiled_regions import CompiledRegions
    from memprof.recorder.dry.device.virtual_device import VirtualDevice
    from memprof.recorder.dry.kernel_probe import Kernels
    from memprof.recorder.dry.mode import DryMode
    from memprof.recorder.dry.routing import Routing
    from memprof.recorder.log import RawLog
    from memprof.recorder.memory.inventory import Inventory
    from memprof.recorder.operators import OperatorMode
    from memprof.recorder.profiler.sources import MemorySources
    from memprof.recorder.steps.usages import Usages

#: torch's own modules that also compile functions in an eager job: cond, scan and the like.
_COMPILING = ("torch._higher_order_ops.", "torch.nn.attention.")
#: Replaces the address of a kernel's temporary memory.
_KERNEL = 1


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
    ) -> None:
        """Changes nothing yet.

        Args:
            refuse: Ends the job with a message, which the parent prints.
            spool: The recording's spool folder, through which ranks exchange the values that sizes depend on.
            device: The virtual device; None if the job runs on the machine's processor.
            is_given_rank: Whether the parent starts each rank, with its number in the environment.
            expert_load: Tokens that a rank's experts receive, as a multiple of their equal share.
        """
        self._answers = Answers(RecordedValues.read(spool), refuse)
        self._routing: Routing | None = None
        self._expert_load = expert_load
        self._device = device
        self._refuse = refuse
        self._mode: DryMode | None = None
        self._kernels: Kernels | None = None
        self._regions: CompiledRegions | None = None
        self._sources: MemorySources | None = None
        self._files = Files(self._answers.count_left_out, refuse, self._is_begun)
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
        else:
            refuse_missing_device(self._refuse)
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
            after_operator(now_ns, is_backward)

        return note

    def notes(self) -> list[str]:
        """Returns notes on the dry run for the reader of the trace."""
        sparse = self._mode.sparse if self._mode is not None else None
        found = [
            part.notes()
            for part in (self._answers, self._kernels, sparse, self._regions, self._device, self._routing)
            if part is not None
        ]
        return [note for notes in found for note in notes]

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
        from memprof.recorder.dry.compiling.compiled_regions import CompiledRegions
        from memprof.recorder.dry.kernel_probe import Kernels
        from memprof.recorder.dry.mode import DryMode, lent
        from memprof.recorder.dry.routing import Routing
        from memprof.recorder.dry.subclasses import allow_subclasses, let_data_be_assigned
        from memprof.recorder.dry.values.numbers import answer_conversions

        allow_subclasses()
        self._kernels = Kernels()
        self._routing = Routing(self._expert_load)
        self._mode = DryMode(self._answers, self._kernels, self._refuse, self._device, self.rank.role, self._routing)
        self._regions = CompiledRegions(self._mode, self._refuse, is_virtual=self._device is not None)
        if self._device is not None:
            self._device.install(self._mode, self._answers.count_left_out)
        else:
            NativeEvents.initialize()  # kernels are tried under torch's profiler
        let_data_be_assigned(lent, self._mode)
        answer_conversions(self._answers, self._mode)
        self._mode.__enter__()
        os.register_at_fork(after_in_child=self._leave)
        self._show_no_values()
        load_real_data(self._leave)
        self._leave_out()
        follow_pools(nullcontext() if self._device is None else self._device.calls)

    def _leave(self) -> None:
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if self._device is not None:
            self._device.leave()

    def _show_no_values(self) -> None:
        """Supplies placeholders where Python reads a tensor without torch's operators."""
        from torch._subclasses import fake_tensor
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        answers = self._answers
        fakes: Any = fake_tensor
        fake: Any = FakeTensor

        def numpy(tensor: Any, **_: Any) -> Any:
            return answers.values(tensor).numpy()

        def array(tensor: Any, dtype: Any = None, **_: Any) -> Any:
            values = answers.values(tensor).numpy()
            return values if dtype is None else values.astype(dtype)

        fake.numpy, fake.__array__ = numpy, array
        fake.__format__ = lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form)
        fake.tolist = lambda tensor: answers.values(tensor, "tolist").tolist()
        span = dry_span if self._device is None else self._device.span
        fake.data_ptr = lambda tensor: span(tensor)[0]  # otherwise each call prints a warning
        fakes.log.setLevel(logging.CRITICAL)  # it prints the tracebacks of errors that it then raises
        printing: Any = torch._tensor_str
        text = printing._str
        copying: Any = torch.Tensor
        deepcopy = copying.__deepcopy__

        @wraps(deepcopy)
        def copy(tensor: Any, memo: Any) -> Any:
            if isinstance(tensor, FakeTensor):
                return deepcopy(tensor, memo)
            with unset_fake_temporarily():  # the copy must be real, to receive the data
                return deepcopy(tensor, memo)

        copying.__deepcopy__ = copy

        @wraps(text)
        def show(*args: Any, **kwargs: Any) -> str:
            with unset_fake_temporarily():  # intermediate tensors must be real, to show data
                shown: str = text(*args, **kwargs)
            return shown

        printing._str = show
        # Activation checkpointing saves the generator's state, which no operator returns.
        state = torch.get_rng_state

        @wraps(state)
        def rng_state() -> torch.Tensor:
            tensor = state()
            sources = self._sources
            if sources is not None and sources.is_open and sources.on_output is not None:
                sources.on_output(tensor, clock_ns())
            return tensor

        torch_module: Any = torch
        torch_module.get_rng_state = rng_state
        for owner in (torch_module, copying):
            is_finite = owner.isfinite
            owner.isfinite = lambda tensor, ask=is_finite: answers.mark_true(ask(tensor))
        # Nor does an operator resize the storages that fully_shard frees and reallocates.
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        @wraps(resize)
        def resize_(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            if self._device is not None:
                self._device.memory.resized(storage)
            elif self._sources is not None:
                self._sources.resized(storage)
            return resized

        storages.resize_ = resize_
        share = storages.share_memory_

        @wraps(share)
        def share_memory_(storage: Any, *args: Any, **kwargs: Any) -> Any:
            has_memory = storage.device.type != "meta"  # without memory it is valid in any process
            return share(storage, *args, **kwargs) if has_memory else storage

        storages.share_memory_ = share_memory_
        for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
            setattr(storages, name, outside_dry_run(getattr(storages, name)))
        # Optimizers and clipping choose their kernels by the type of their inputs.
        for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            if FakeTensor not in types:
                types.append(FakeTensor)
        hide_fakes()
        # `module.to()` would swap two tensors of this type, but assigns new data to any other.
        swap = torch.utils.swap_tensors

        def give(first: Any, second: Any) -> None:
            if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
                if "meta" in (first.device.type, second.device.type):  # data cannot be assigned across these devices
                    torch._C._swap_tensor_impl(first, second)
                    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
                else:
                    first.data = second.data
            else:
                swap(first, second)  # type: ignore[no-untyped-call]

        utils: Any = torch.utils
        utils.swap_tensors = give
        from memprof.recorder.dry.sequences import pad_packed

        functions: Any = torch._VF
        functions._pad_packed_sequence = pad_packed
        # Tensors are pickled to a data loader's worker and back.
        pickle_shapes()

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
