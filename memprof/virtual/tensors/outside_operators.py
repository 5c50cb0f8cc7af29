"""Adapts to fake tensors what torch does outside of operators: reads by Python, generators, storages, types.

``torch.tensor([loss, 1.0])`` and ``torch.Tensor([std])`` convert each element with operators turned off
(``recursive_store`` in torch/csrc/utils/tensor_new.cpp).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim import optimizer
from torch.utils import _foreach_utils

from memprof.virtual.sizes.sequences import pad_packed
from memprof.virtual.tensors.tensor_files import outside_dry_run
from memprof.virtual.values.answers import Answers

_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__complex__": complex,
    "__float__": float,
    "__index__": int,
    "__int__": int,
}
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_PYTHON = torch._C.DispatchKey.Python


def answer_conversions(answers: Answers, mode: FakeTensorMode) -> None:
    """Lets fake tensors be converted to numbers where no dispatch mode is called.

    Args:
        answers: Supplies the placeholders.
        mode: The dry run's mode; fake tensors of other modes, such as a compiler's, are left alone.
    """
    for name, convert in _CONVERSIONS.items():
        setattr(FakeTensor, name, _converted(getattr(torch.Tensor, name), convert, answers, mode))


def _converted(original: Any, convert: Callable[[Any], Any], answers: Answers, mode: FakeTensorMode) -> Any:
    @wraps(original)
    def converted(tensor: FakeTensor) -> Any:
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        is_refused = tensor.numel() != 1 or (is_float and original.__name__ == "__index__")
        if is_refused or tensor.fake_mode is not mode or not _is_excluded(_PYTHON):
            return original(tensor)
        return convert(answers.value(tensor))

    return converted


def show_no_values(answers: Answers, span: Callable[[torch.Tensor], tuple[int, int]]) -> None:
    """Supplies placeholders where Python reads a tensor without torch's operators.

    Args:
        answers: Supplies the placeholders.
        span: Returns what stands for a tensor's address, and its bytes.
    """
    fake: Any = FakeTensor

    def numpy(tensor: Any, **_: Any) -> Any:
        return answers.values(tensor).numpy()

    def array(tensor: Any, dtype: Any = None, **_: Any) -> Any:
        values = answers.values(tensor).numpy()
        return values if dtype is None else values.astype(dtype)

    fake.numpy, fake.__array__ = numpy, array
    fake.__format__ = lambda tensor, form: format(tensor.item() if tensor.dim() == 0 else str(tensor), form)
    fake.tolist = lambda tensor: answers.values(tensor, "tolist").tolist()
    fake.data_ptr = lambda tensor: span(tensor)[0]
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # what C++ reads itself would warn, once a process: here, unseen
        torch.empty(1).untyped_storage().data_ptr()
    fake_tensor.log.setLevel(logging.CRITICAL)  # it prints the tracebacks of errors that it then raises
    printing: Any = torch._tensor_str
    text = printing._str
    torch_module: Any = torch
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
    for owner in (torch_module, copying):
        is_finite = owner.isfinite
        owner.isfinite = lambda tensor, ask=is_finite: answers.mark_true(ask(tensor))


def follow_memory(on_tensor: Callable[[torch.Tensor], None], on_resize: Callable[[torch.UntypedStorage], None]) -> None:
    """Follows the memory that no operator allocates, and shares storages without data with other processes.

    Args:
        on_tensor: Called with each state of a generator, which activation checkpointing saves.
        on_resize: Called with each storage that was resized: fully_shard frees and reallocates them.
    """
    torch_module: Any = torch
    state = torch.get_rng_state

    @wraps(state)
    def rng_state() -> torch.Tensor:
        tensor = state()
        on_tensor(tensor)
        return tensor

    torch_module.get_rng_state = rng_state
    storages: Any = torch.UntypedStorage
    resize = storages.resize_

    @wraps(resize)
    def resize_(storage: Any, size: int) -> Any:
        resized = resize(storage, size)
        on_resize(storage)
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


def accept_fakes() -> None:
    """Makes torch treat fake tensors as plain ones where it looks at their type, or calls C++."""
    # Optimizers and clipping choose their kernels by the type of their inputs.
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)
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
    functions: Any = torch._VF
    functions._pad_packed_sequence = pad_packed
