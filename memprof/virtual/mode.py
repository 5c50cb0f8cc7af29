"""Runs the operators of a dry run: on fake tensors, or for real if all their inputs are data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from memprof.recorder.calls.dispatch_modes import follow, is_higher_order
from memprof.recorder.calls.read_values import deciding, is_read
from memprof.recorder.calls.torch_state import overloads
from memprof.trace.operator_facts import COMPARES, READS_NUMBER
from memprof.virtual.ranks.collectives import coalesced_work, place_of_group, returned_argument
from memprof.virtual.refusals import cannot, refuse_endless, require_cuda, without_kernel, without_size
from memprof.virtual.repeats.meter import REPEATED
from memprof.virtual.sizes.bounds import is_by_bytes, is_exact, upper_bound
from memprof.virtual.sizes.kernel_probe import Kernels
from memprof.virtual.sizes.routing import Routing
from memprof.virtual.sizes.sequences import SIZED_BY_DATA, ctc_temporary_bytes
from memprof.virtual.tensors.sparse_operators import SparseOperators
from memprof.virtual.values.answers import Answers
from memprof.virtual.values.known import compute, follow_values, has_shares, is_data, known, note, write
from memprof.virtual.values.nonzeros import follow_marks, position_bytes
from memprof.virtual.values.overwritten import InPlace, note_overwritten, stand_in
from memprof.virtual.values.random_stream import RandomStream

if TYPE_CHECKING:
    from memprof.virtual.device.virtual_device import VirtualDevice
    from memprof.virtual.ranks.role import Role

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_FROM_FILE = _aten.from_file.default
_Tensor = torch.Tensor
_LISTS = (list, tuple)
#: FakeTensorMode caches operators with their arguments, which would keep these operators' storages alive.
_OF_STORAGES = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
_READS, _COMPARISONS = overloads(READS_NUMBER), overloads(COMPARES)
#: torch's message for an operator made with only `torch.library.custom_op`.
_NO_FAKE = "no fake impl registered"


class DryMode(FakeTensorMode):
    """Gives every operator's outputs their shapes and types, and no memory.

    Tensors made before the mode is on, those filled by loaders and ``torch.tensor``, and small ones of integers hold
    data. Operators on these alone are executed: the sizes of batches, lengths and masks then match a real run.
    In an operator with a fake tensor, they are replaced by fake tensors of their shape.

    Attributes:
        extra_bytes: The last operator's peak kernel memory beyond its result.
        is_begun: Whether tensors created on the processor are fake; otherwise only those on the device are.
        sparse: Runs operators on sparse tensors.
        answers: Supplies placeholders.
        random: Draws random numbers.
        refuse: Ends the run with a sentence.
    """

    def __init__(
        self,
        answers: Answers,
        kernels: Kernels,
        refuse: Callable[[str], NoReturn],
        device: VirtualDevice | None = None,
        role: Role | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Creates the mode; `torch._C._set_dispatch_mode` or entering it activates it.

        Args:
            answers: Supplies placeholders when the job reads values that were not computed.
            kernels: Measures the temporary memory of kernels.
            refuse: Ends the job with a message: an operator cannot be dry-run.
            device: The virtual device; None if the job runs on the machine's processor.
            role: Receives each operator and its result, by which ranks are compared, and the collectives.
            routing: Divides tokens among experts; equally where it is None.
        """
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.allow_fallback_kernels = False  # it would allocate real memory, and run the operator
        self.extra_bytes = 0
        self.answers = answers
        self._kernels = kernels
        self.refuse = refuse
        self._device = device
        self._role = role
        self._routing = routing or Routing(1.0)
        self._in_place = InPlace()
        self.sparse = SparseOperators(answers, refuse, is_on_device=device is not None)
        self.random = RandomStream()
        self._is_inside = False
        self._sparse_bytes: int | None = None
        self.is_begun = device is None

    #: torch passes higher-order operators by default only to FakeTensorMode itself, not to subclasses.
    supports_higher_order_operators = True
    is_followed = True
    fake_type: type | None = FakeTensor

    def put(self) -> None:
        """Pushes the mode on the stack for the duration of one operator."""
        torch._C._set_dispatch_mode(self)

    def take(self) -> None:
        """Removes the mode from the stack for the duration of one operator."""
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)

    @property
    def avoid_device_init(self) -> bool:
        """Returns True: no device is ever initialized."""
        return True

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """Returns the ragged size of a jagged tensor: a number of its own, as in a real run. Nothing is traced."""
        from torch.nested._internal.nested_int import NestedIntNode

        self.nt_tensor_id_counter += nt_tensor_id is None
        number = self.nt_tensor_id_counter if nt_tensor_id is None else nt_tensor_id
        return torch.SymInt(NestedIntNode(number, 1))  # type: ignore[no-untyped-call]  # torch's is not annotated

    def __deepcopy__(self, memo: Any) -> DryMode:
        """Returns the mode itself: a copy of a model's tensors belongs to the same dry run."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        if is_higher_order(func):
            return self._run_higher_order(func, args, kwargs or {})
        kwargs = _on_one_processor(kwargs)
        device = self._device
        if device is None:
            if func is _DEVICE and type(args[0]) is FakeTensor:  # autograd reads it twice for each gradient
                return args[0].fake_device
            if kwargs and getattr(kwargs.get("device"), "type", "") == "cuda":
                require_cuda()
            result = self._run(func, types, args, kwargs, is_placed=False)
            self.answers.after(func)
            return result
        if func is _DEVICE:
            return device.answer(args[0])
        kwargs, is_placed = device.placed(kwargs)
        if torch.is_inference_mode_enabled() and not self._is_inside and _is_composite(func):
            with self:  # the autograd keys, which would decompose it, are off
                return func.decompose(*args, **kwargs)
        if self._is_inside:  # tensors inside torch's Python decompositions use no device memory
            return self._run(func, types, args, kwargs, is_placed=is_placed)
        self._is_inside = True
        self._sparse_bytes = None
        try:
            result = self._run(func, types, args, kwargs, is_placed=is_placed)
        finally:
            self._is_inside = False
        self.answers.after(func)
        device.after(func, args, kwargs, result, self._sparse_bytes)
        return result

    def _run_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operators inside a higher-order one; if it cannot be followed, returns torch's fake result.

        Conditions on values that were not computed get the same placeholders as in Python's own ``if`` and ``while``.
        """
        result = follow(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        from torch._higher_order_ops.utils import registered_hop_fake_fns

        rule = func.python_key_table.get(FakeTensorMode)
        if func in registered_hop_fake_fns:
            return super().__torch_dispatch__(func, (), args, kwargs)
        if rule is None:
            self.refuse(cannot(func, "it is a higher-order operator without a fake implementation"))
        return rule(self, *args, **kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, *, is_placed: bool) -> Any:
        """Runs one operator."""
        self.extra_bytes = 0
        if func is REPEATED:
            return self._stand_for(args[0])
        if func is _FROM_FILE:
            return func(*args, **kwargs)  # data of the job, as its loader's tensors are
        has_fake, has_data = _kinds(args)
        of_keywords = _kinds(tuple(kwargs.values())) if kwargs else (False, False)
        has_fake, has_data = has_fake or of_keywords[0], has_data or of_keywords[1]
        if not has_fake and not is_placed and (has_data or not self.is_begun):
            self.answers.recorded.skip(func, args, sys._getframe(1))
            self.answers.reads += func in _READS
            if self._device is not None or not self.is_begun:
                if self._device is not None and kwargs.get("pin_memory"):
                    kwargs = {**kwargs, "pin_memory": False}  # noted by the device: this machine may be without a GPU
                return func(*args, **kwargs)  # no mode is active inside one
            self.extra_bytes = self.sparse.temporary_bytes(func, args, kwargs)
            result = func(*args, **kwargs)
            if not self.extra_bytes:  # batches of loaders are data: their masks are summed in full
                _, self.extra_bytes = self._kernels.learn(func, args, kwargs, result, self._make)
                self.extra_bytes += position_bytes(func, args, result)
            return result
        if self._role is not None and place_of_group(func) >= 0:
            self._role.note_collective(func, args)
            with self:
                work = coalesced_work(func, args)
            if work is not None:
                return work
        if self.sparse.are_needed(func, args, kwargs):
            return self._run_sparse(func, args, kwargs)
        argument = returned_argument(func, args, kwargs)
        if argument is not None:
            return argument
        sized = SIZED_BY_DATA.get(func) or (self._device.shape_of(func) if self._device is not None else None)
        if sized is not None:
            with self:
                result = sized(*args, **kwargs)
            self.extra_bytes = ctc_temporary_bytes(func, args) if self._device is None else 0
            return result
        given, given_by_name = args, kwargs
        if has_data:
            if func._schema.is_mutable and write(func, args, kwargs):
                return args[0]
            args = lent(args, self)
            kwargs = {name: lent(value, self) for name, value in kwargs.items()}
        if func in _READS:
            value = self.answers.value(args[0], func)
            return bool(value) if func is _aten.is_nonzero.default else value
        self.cache_enabled = func not in _OF_STORAGES
        try:
            if is_by_bytes(func, args) or (func is _aten.index.Tensor and self.answers.recorded.has(func, args)):
                # torch's rule for fake tensors refuses such masks, or looks for what is true in any
                result = self._sized_by_values(func, args, kwargs, given, given_by_name)
            else:
                result = super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            result = self._sized_by_values(func, args, kwargs, given, given_by_name)
        except DataDependentOutputException:
            if func not in _COMPARISONS:
                self.refuse(cannot(func, "its result depends on values"))
            return self.answers.equality(func)
        except (UnsupportedOperatorException, NotImplementedError) as error:
            if func._schema.returns:
                self.refuse(without_kernel(func, error))
            result = None  # it only writes to its arguments, such as fused SGD
        except RuntimeError as error:
            if _NO_FAKE in str(error):
                self.refuse(without_kernel(func, None))
            result = self._kernels.stand_in(func, args, kwargs, self._make) if self._device is None else None
            if result is None:
                raise
        result = self._in_place.result(func, args, result)
        if self._device is None:
            result, self.extra_bytes = self._kernels.learn(func, args, kwargs, result, self._make)
            with self:
                self.extra_bytes += position_bytes(func, given, result)
        if not has_fake and is_data(func, result):
            return func(*args, **kwargs)
        if self._role is not None:
            self._role.note_operator(func, result)
        drawn = self.random.draw(func, args, kwargs, result)
        if isinstance(result, FakeTensor):
            refuse_endless(result)
            self.answers.mark(func, args, result)
        follow_values(func, given, given_by_name, result)
        follow_marks(func, args, result)
        if has_data and func._schema.is_mutable:
            note_overwritten(func, given, given_by_name, args, kwargs)
        self._routing.follow(func, given, result)
        if drawn is not None:
            note(result, drawn)
        return result

    def _stand_for(self, temporary_bytes: int) -> torch.Tensor:
        """Returns an empty tensor: the operators that it stands for take this much memory, and have freed it."""
        with torch.no_grad(), self:
            made = torch.empty((0,))  # resets the extra bytes
        if self._device is None:
            self.extra_bytes = temporary_bytes
        elif temporary_bytes:
            self._device.memory.pass_through([temporary_bytes])
        return made

    @property
    def place(self) -> torch.device:
        """The device on which the job trains."""
        return torch.device("cpu" if self._device is None else "cuda")

    def _run_sparse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator that reads or makes a sparse tensor."""
        result, extra_bytes = self.sparse.run(self, func, args, kwargs)
        if self._device is None:
            self.extra_bytes = extra_bytes
        else:
            self._sparse_bytes = extra_bytes
        if func._schema.is_mutable:
            follow_values(func, args, kwargs, result)
        if self._role is not None:
            self._role.note_operator(func, result)
        return result

    def _sized_by_values(self, func: Any, args: Any, kwargs: Any, given: Any, given_by_name: Any) -> Any:
        """Returns the result of an operator whose size depends on values: exact if they are known, else the largest."""
        self.answers.reads += 1
        values = compute(func, given, given_by_name)
        is_recorded = is_read(func)
        rows = self.answers.recorded.rows(func, deciding(func, args), sys._getframe(1)) if is_recorded else None
        with self:
            if values is not None and (rows is None or not has_shares(given)):
                made = args[0].new_empty(values.shape, dtype=values.dtype)
                result = made if values.is_contiguous() else made.as_strided(values.shape, values.stride())
                note(result, values)
                return result
            result = upper_bound(func, args, kwargs, rows)
        if result is None:
            self.refuse(without_size(func))
        if rows is None and not is_exact(func, args):
            self.answers.count_bound(func)
        return result

    def _make(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad(), self:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _on_one_processor(kwargs: Any) -> dict[str, Any]:
    """Returns an operator's keyword arguments with ``cpu:0`` as ``cpu``, as torch's tensors report it; fakes do not."""
    device = kwargs.get("device") if kwargs else None
    if device is None or device.type != "cpu" or device.index is None:
        return kwargs or {}
    return {**kwargs, "device": torch.device("cpu")}


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch runs an operator as a sequence of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _kinds(values: Any) -> tuple[bool, bool]:
    """Returns whether an operator's arguments contain fake tensors, and tensors with data."""
    has_fake = has_data = False
    for value in values:
        if isinstance(value, FakeTensor):
            has_fake = True
        elif isinstance(value, _Tensor):
            has_data = True
            has_fake = has_fake or stand_in(value) is not None
        elif isinstance(value, _LISTS):
            inner = _kinds(value)
            has_fake, has_data = has_fake or inner[0], has_data or inner[1]
    return has_fake, has_data


def lent(value: Any, mode: DryMode) -> Any:
    """Returns arguments in which tensors with data are replaced by fake tensors of their shape."""
    if isinstance(value, _LISTS):
        return type(value)(lent(item, mode) for item in value) if type(value) in _LISTS else value
    # A class without operators of its own, such as one of fastai's pictures, is as any tensor with data.
    is_plain = isinstance(value, _Tensor) and type(value).__torch_dispatch__ is _Tensor.__torch_dispatch__
    if not is_plain or value.layout is not torch.strided:
        return value  # FakeTensorMode converts the rest
    whole = stand_in(value)
    if whole is not None:
        with torch.no_grad(), mode:
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    with torch.no_grad(), mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    values = known(value)
    if values is not None:
        note(made, values)
    return made
