"""Autocasting on a virtual device: the types in which torch runs CUDA operators.

torch's own autocast kernels ignore tensors that C++ does not see on the device, such as these (`device.face`); so
the rules are registered again here, at the same dispatch key. Lists and rules: aten/src/ATen/autocast_mode.h
and autocast_mode.cpp, torch 2.13; operators missing from this torch are omitted.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.dispatch_modes import map_tensors, tensors_in
from memprof.trace.operator_facts import AUTOCAST_FP32, AUTOCAST_FP32_RESULT, AUTOCAST_LOWER, AUTOCAST_WIDEST
from memprof.virtual.device.face import is_on_device

_KEY = "AutocastCUDA"
_SHORT = (torch.float16, torch.bfloat16)


class Casts:
    """Copies of parameters in autocast's type, cached until the context exits, as in torch."""

    def __init__(self) -> None:
        """Starts with an empty cache."""
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def install(self) -> None:
        """Registers the rules with torch, for good."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library  # the rules are unregistered with it
        rules = (
            (AUTOCAST_LOWER, self._lower),
            (AUTOCAST_FP32, _full),
            (AUTOCAST_FP32_RESULT, _full_result),
            (AUTOCAST_WIDEST, _widest),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns on the job's stderr that its own kernels are overridden
            for names, rule in rules:
                for operator in filter(None, map(_find, names)):
                    library.impl(operator, _kernel(operator, rule), _KEY, allow_override=True)
        torch_module: Any = torch
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._kept.clear()
            clear()

        torch_module.clear_autocast_cache = clear_both

    def lower(self, value: Any) -> Any:
        """Returns a tensor in autocast's type; other values unchanged."""
        dtype = torch.get_autocast_dtype("cuda")
        if not _is_eligible(value) or value.dtype is dtype:
            return value
        is_kept = (
            value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()  # since torch 2.11 (pytorch pull request 165068)
        )
        if not is_kept:
            return value.to(dtype)
        known = self._kept.get(id(value))
        if known is None or known[0]() is not value:
            known = self._kept[id(value)] = (weakref.ref(value), value.to(dtype))
        return known[1]

    def _lower(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return _call(operator, args, kwargs, self.lower)


def _find(name: str) -> Any:
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _kernel(operator: Any, rule: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return rule(operator, args, kwargs)

    return run


def _full(operator: Any, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(torch.float32) if _is_eligible(value) and value.dtype in _SHORT else value

    return _call(operator, args, kwargs, cast)


def _full_result(operator: Any, args: Any, kwargs: Any) -> Any:
    is_short = _is_eligible(args[0]) and args[0].dtype in _SHORT
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    if not is_short or has_dtype:
        return operator(*args, **kwargs)
    if operator._schema.name == "aten::norm":
        return torch.ops.aten.norm(*args, **kwargs, dtype=torch.float32)
    return operator(*args, **{**kwargs, "dtype": torch.float32})


def _widest(operator: Any, args: Any, kwargs: Any) -> Any:
    found = [tensor.dtype for tensor in tensors_in(args) if _is_eligible(tensor)]
    wide = torch.float32 if torch.float32 in found or len(set(found)) > 1 else None
    if wide is None:
        return operator(*args, **kwargs)

    def cast(value: Any) -> Any:
        return value.to(wide) if _is_eligible(value) else value

    return _call(operator, args, kwargs, cast)


def _call(operator: Any, args: Any, kwargs: Any, cast: Callable[[Any], Any]) -> Any:
    """Calls an operator on cast arguments.

    The last is cast first: autocast's C++ wrapper casts them in the call's own argument list, which GCC, torch's
    compiler for Linux, evaluates from the right (WrapFunction_, aten/src/ATen/autocast_mode.h).
    """
    found = [map_tensors(cast, value) for value in reversed([*args, *kwargs.values()])][::-1]
    return operator(*found[: len(args)], **dict(zip(kwargs, found[len(args) :], strict=True)))


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_on_device(value) and value.dtype in (torch.float32, *_SHORT)
