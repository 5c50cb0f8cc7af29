"""Finds the modules of a job that torch.compile has compiled."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from memprof.errors import PolicyError
from memprof.policies.rewrite.stack_marks import SAVES_ITSELF
from memprof.policies.runtime.forwards import outermost_layer
from memprof.policies.runtime.job import Job


def find_compiled(job: Job, names: Iterable[str] = ("",)) -> str | None:
    """Returns the name of a compiled module around or within the named ones, "" for the model; None without any."""
    if job.is_compiled:
        return ""
    compiled = [name for name, module in job.modules_named().items() if is_compiled(module)]
    chosen = list(names)
    return next(
        (each for each in compiled if any(_is_within(each, one) or _is_within(one, each) for one in chosen)), None
    )


def import_compiler() -> None:
    """Imports torch's compiler, as its checkpoints and modes do when first called, in a thread of its own.

    The import leaves reference cycles that hold all frames below it, with their tensors: for good where the garbage
    collector is off. None of these frames may be the job's.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "torch._dynamo").result()


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether calls of a module run compiled code."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forwards = vars(module).get("forward"), outermost_layer(module)
    return any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)


def require_eager(job: Job, names: Iterable[str], policy: str) -> None:
    """Rejects modules whose saved tensors compiled code would handle.

    Raises:
        PolicyError: One of them is compiled, or contains or is in one that is.
    """
    compiled = find_compiled(job, names)
    if compiled is not None:
        raise PolicyError(SAVES_ITSELF.format(what=compiled or "The model", policy=policy))


def _is_within(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")
