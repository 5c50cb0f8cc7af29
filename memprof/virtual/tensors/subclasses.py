"""Classes of libraries' tensors over fake tensors, such as packed 4-bit weights, and the class of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch._subclasses
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memprof.recorder.calls.dispatch_modes import let_operators_through
from memprof.virtual.values.known import carry

#: The fields of a tensor, and the names of those that torch and memprof give a fake one.
_FIELDS: Any = vars(torch.Tensor)["__dict__"]
_OF_FAKES: set[str] = set()


def allow_subclasses() -> None:
    """Lets libraries make their tensor subclasses of fake tensors.

    ``torch.Tensor._make_subclass`` refuses a tensor that has a Python object of another class, as fake tensors have.
    A fake tensor becomes a view of itself with a class derived from both: the library's methods come first, operators
    stay the fake tensor's.
    """
    make: Any = torch.Tensor._make_subclass

    def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return make(cls, data, requires_grad, **kwargs)
        made = data.detach()
        made.requires_grad_(requires_grad)  # now: a lazy module's parameter refuses it once it has its class
        _OF_FAKES.update(vars(made))
        made.__class__ = _over_fake(cls)
        return made

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[method-assign, assignment]

    def viewed(tensor: FakeTensor, cls: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = tensor.view_as(tensor)
        if type(made) is FakeTensor:
            _OF_FAKES.update(vars(made))
        if cls is torch.Tensor:
            made.__class__ = FakeTensor
        else:
            made.__class__ = cls if issubclass(cls, FakeTensor) else _over_fake(cls)
        return made

    fake: Any = FakeTensor
    fake.as_subclass = viewed
    _let_parameters_be_made()


def let_data_be_assigned(lent: Callable[[Any, Any], Any], mode: FakeTensorMode) -> None:
    """Lets a job assign to a fake tensor's ``data``, also a tensor with data: ``weight.data = torch.tensor(rows)``.

    Args:
        lent: Returns a fake tensor of the mode, of the shape of a tensor with data.
        mode: The dry run's mode; fake tensors of other modes, such as a compiler's, are given no other data.
    """
    data: Any = torch.Tensor.data
    fake: Any = FakeTensor

    def assign(tensor: Any, value: Any) -> None:
        given = value if isinstance(value, FakeTensor) or tensor.fake_mode is not mode else lent(value, mode)
        data.__set__(tensor, given)
        if isinstance(given, FakeTensor):
            tensor.fake_device = given.fake_device  # stored by torch separately from the data
            carry(given, tensor)

    fake.data = property(data.__get__, assign)


def lend_parts(values: Iterable[Any], lend: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces the tensors with data inside of tensors that also wrap fake ones: torch traces no mixture.

    Such is the state of torchao's optimizers, which wraps a small table made of a list.

    Args:
        values: What a function is about to be traced with.
        lend: Returns a fake tensor of the shape of a tensor with data.
    """
    for value in values:
        if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
            continue
        parts = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
        with_data = [name for name, part in parts.items() if type(part) is torch.Tensor]
        if any(isinstance(part, FakeTensor) for part in parts.values()):
            for name in with_data:
                setattr(value, name, lend(parts[name]))


def _let_parameters_be_made() -> None:
    """Lets libraries make a parameter with the class of another: `type(parameter)(data, requires_grad=False)`.

    In a dry run that class is the fake tensors', whose constructor torch calls with other arguments: a mode, or a
    tensor without data of its own.
    """
    owner: Any = FakeTensor
    make = owner.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or not _is_value(args[0], has_mode="fake_mode" in kwargs):
            return make(cls, *args, **kwargs)
        return torch.nn.Parameter(args[0], kwargs.get("requires_grad", True))

    owner.__new__ = new


def _is_value(argument: Any, *, has_mode: bool) -> bool:
    """Whether an argument is the data of a parameter: torch itself gives a mode with tensors that are not fake."""
    return isinstance(argument, FakeTensor) or (isinstance(argument, torch.Tensor) and not has_mode)


class _Converting(torch.Tensor):
    """Gives results the class of a tensor in a library's `super().__torch_function__`, which fake tensors turn off."""

    __torch_function__ = vars(torch.Tensor)["__torch_function__"]


@cache
def _over_fake(kind: type) -> type:
    """Returns a class that is a library's and a fake tensor's, under the library's name."""
    members = {"__module__": kind.__module__, "detach": _detached, "__dict__": property(_FIELDS.__get__, _set_fields)}
    if issubclass(kind, (UninitializedParameter, UninitializedBuffer)):
        members |= {"materialize": _materialize, "shape": property(_shape_of_unmade)}
    over: Any = type(kind)(kind.__name__, (kind, _Converting, FakeTensor), members)
    # The library's, or torch's, which gives results their class: torch leaves out the latter for fake tensors.
    owner = next(base for base in kind.__mro__ if "__torch_function__" in vars(base))
    over.__torch_function__ = vars(owner)["__torch_function__"]
    let_operators_through(over)
    made: type = over
    return made


def _set_fields(tensor: Any, fields: dict[str, Any]) -> None:
    """Replaces the fields of a library's tensor, and keeps those of the fake one: its mode and device.

    MONAI assigns a copy of another tensor's `__dict__`, which has that one's device.
    """
    own = {name: value for name, value in vars(tensor).items() if name in _OF_FAKES}
    given = {name: value for name, value in fields.items() if name not in _OF_FAKES}
    _FIELDS.__set__(tensor, {**given, **own})


def _detached(tensor: Any) -> Any:
    """Detaches a tensor and keeps its class and attributes, as `nn.Parameter` expects where a module is moved."""
    made = FakeTensor.detach(tensor)
    made.__class__ = type(tensor)
    for name, value in vars(tensor).items():
        vars(made).setdefault(name, value)
    return made


def _materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """Makes the parameter or buffer of a lazy module, whose shape its first call gives, a fake tensor."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    tensor.__class__ = FakeTensor
    tensor.data = torch.empty(shape, device=device or tensor.device, dtype=dtype or tensor.dtype)
    tensor._is_param = is_parameter


def _shape_of_unmade(tensor: Any) -> Any:
    """Returns the shape that C++ has for a lazy module's tensor to torch's fake tensors; raises for everybody else."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._"):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.size(tensor)
    return UninitializedParameter.shape.fget(tensor)  # type: ignore[attr-defined]  # a property of its mixin


_ASKING = ("memprof", "torch")


class _NoTensor:
    """A class without instances, which jobs see in place of the class of fake tensors."""


class _Subclasses(ModuleType):
    """The module ``torch._subclasses`` of a dry run."""

    @property
    def FakeTensor(self) -> Any:  # noqa: N802  # torch's name
        """The class of fake tensors for torch and memprof, and one without instances for the job.

        TorchDynamo, which reads attributes for the job's code that it traces, does not name the class.
        """
        frame = sys._getframe(1)
        is_asking = str(frame.f_globals.get("__name__")).partition(".")[0] in _ASKING
        return FakeTensor if is_asking and "FakeTensor" in frame.f_code.co_names else _NoTensor


def hide_fakes() -> None:
    """Hides the class from the job, for good."""
    vars(torch._subclasses).pop("FakeTensor", None)  # TorchDynamo reads modules by their dictionaries
    torch._subclasses.__class__ = _Subclasses
