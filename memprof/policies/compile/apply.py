"""Compiles modules in place, with PyTorch's memory budget for activations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.compile.policy import FUSION
from memprof.policies.plan.patterns import match_modules, outermost
from memprof.policies.runtime.job_traits import find_compiled
from memprof.policies.runtime.replaced import is_dry_run

if TYPE_CHECKING:
    from memprof.policies.compile.policy import Compile
    from memprof.policies.runtime.job import Job


def apply(job: Job, policy: Compile) -> None:
    """Compiles the chosen modules; each is compiled when it is first called.

    A model that the job compiles itself, as a whole or in parts, stays compiled as it is, under the budget.

    Raises:
        PolicyError: A pattern matches nothing, or this machine has no C++ compiler for code on the CPU.
    """
    modules = job.modules_named()
    names = outermost(match_modules(policy.modules, modules))
    compiler = os.environ.get("CXX") or "g++"
    if job.device.type == "cpu" and not is_dry_run() and not (shutil.which(compiler) or shutil.which("clang++")):
        raise PolicyError("torch.compile needs a C++ compiler on the CPU, and none was found; install g++.")
    backend = _backend(policy)
    if names == [""]:
        _limit_own_regions(job, policy)
    if names == [""] and find_compiled(job) is not None:
        job.notes.append("The job compiles its model itself; its compiled regions stay, under the activation budget.")
        return
    for name in names:
        job.wrap_forward(modules[name], lambda before: torch.compile(before, backend=backend))
    job.notes.append(
        f"{len(names)} module{'s are' if len(names) > 1 else ' is'} compiled in the first steps, which take longer; "
        "compiled dropout draws other random numbers."
    )


def _limit_own_regions(job: Job, policy: Compile) -> None:
    """Sets the budget, and the limit of fusion, of what the job compiles itself."""
    from torch._functorch import config as tracing
    from torch._inductor import config as inductor

    def limit(settings: Any, name: str, value: float) -> None:
        before = getattr(settings, name)
        setattr(settings, name, value)
        job.on_undo(lambda: setattr(settings, name, before))

    if policy.activation_budget < 1:
        limit(tracing, "activation_memory_budget", policy.activation_budget)
    if policy.fusion_gb >= 0:
        limit(inductor, FUSION, policy.fusion_gb)


def _backend(policy: Compile) -> Callable[..., Any]:
    """Returns torch's compiler under a policy: a new one each time, for code compiled by another is not used again.

    Raises:
        PolicyError: This torch does not support such a budget, or limit.
    """
    import torch._functorch.config as settings
    from torch._inductor import compile_fx as compiler
    from torch._inductor import config

    if not hasattr(settings, "activation_memory_budget"):
        raise PolicyError("activation_memory_budget requires torch 2.4 or newer.")

    options = {}
    if policy.fusion_gb >= 0:
        if not hasattr(config, FUSION):
            raise PolicyError(
                f"compile: torch limits fusion by the peak from 2.15 on, and this is {torch.__version__}; leave out "
                "fusion_gb (fusion=)."
            )
        options[FUSION] = policy.fusion_gb

    def compile_under_budget(graph: Any, inputs: Any) -> Any:
        # What is kept for backward is settled while forward is compiled.
        with settings.patch(activation_memory_budget=policy.activation_budget):
            return compiler.compile_fx(graph, inputs, config_patches=options)  # looked up late: a dry run replaces it

    return compile_under_budget
