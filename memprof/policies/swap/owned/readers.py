"""Brings parameters in for parts of a job that read them: averages of weights, norms, histograms."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from memprof.policies.runtime.job import Job

_PARAMETERS = torch.nn.Module.parameters
#: Functions of torch that iterate over parameters without reading their values.
_GRADIENTS_ONLY = frozenset(
    (function.__code__.co_filename, name)
    for function, names in (
        (torch.nn.Module.zero_grad, ("zero_grad", "requires_grad_")),
        (torch.nn.utils.clip_grad._get_total_norm, ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")),
        (torch.optim.Optimizer.add_param_group, ("add_param_group", "__init__")),
    )
    for name in names
)


def bring_in_for_readers(job: Job, bring_in: dict[int, Callable[[], None]]) -> None:
    """Brings a parameter in when the job reaches it in ``parameters()``, for example to average weights.

    Args:
        job: The job.
        bring_in: Function that brings each parameter in, by the parameter's id.
    """
    for module in job.model.modules():
        if any(id(p) in bring_in for p in module.parameters()):
            job.replace_method(module, "named_parameters", functools.partial(_bringing_in, bring_in))


def _bringing_in(bring_in: dict[int, Callable[[], None]], before: Callable[..., Any]) -> Callable[..., Any]:
    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in before(*args, **kwargs):
            if id(parameter) in bring_in and _reads_values(sys._getframe(1)):
                bring_in[id(parameter)]()
            yield name, parameter

    return named_parameters


def _reads_values(reader: FrameType) -> bool:
    """Returns whether code iterating over parameters may read them: not if it uses only gradients or is memprof's."""
    while reader.f_code is _PARAMETERS.__code__ and reader.f_back is not None:
        reader = reader.f_back
    place = reader.f_code.co_filename, reader.f_code.co_name
    return place not in _GRADIENTS_ONLY and not str(reader.f_globals.get("__name__")).startswith("memprof.")


def bring_in_for_casts(job: Job, module: torch.nn.Module, bring_in: Callable[[], Any]) -> None:
    """Brings in a module's own parameters before ``to``, ``double``, ``half`` and the like.

    Args:
        job: The job.
        module: Any of its modules.
        bring_in: Brings in those of its own parameters that are moved.
    """

    def casting(before: Any) -> Callable[..., Any]:
        def _apply(*args: Any, **kwargs: Any) -> Any:
            bring_in()
            return before(*args, **kwargs)

        return _apply

    job.replace_method(module, "_apply", casting)
