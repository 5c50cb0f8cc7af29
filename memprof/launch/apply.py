"""Applies a plan from the user's own code, to the models of a running job whose modules match it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from memprof.errors import PolicyError
from memprof.policies.plan.patterns import match_modules
from memprof.policies.plan.plan import Plan, fitted
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.policies.plan.prediction import Prediction
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.model_names import WRAPPERS, unwrapped
from memprof.recorder.faults import is_from_signal_handler
from memprof.recorder.memory.live_objects import outermost_modules
from memprof.recorder.memory.tensor_memory import modules_of, named_modules_of, parameter_bytes_of, parameters_of
from memprof.recorder.thread_observation import add_remark, remove_remark
from memprof.units import format_bytes


def apply(
    plan: Plan | str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> Job:
    """Applies a plan to a training job, without any recorder.

        job = memprof.apply("plan.toml", model, optimizer)

    Call it once the model is on its device and the optimizer exists, before the first step. It adds no overhead beyond
    the policies themselves.

    Args:
        plan: The plan, or its TOML file.
        model: The model that will be trained.
        optimizer: Its optimizer, or several.

    Returns:
        The job: ``notes`` lists what was applied or skipped, ``undo()`` reverts all changes.

    Raises:
        PolicyError: The plan was made for another model, or a policy does not fit this one; nothing has been changed.
        BadInputError: The file is missing or not valid TOML.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"memprof.apply takes a torch.nn.Module, not a {type(model).__name__}.")
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    check_model(plan.prediction, model)
    job = Job(model, optimizers_in(optimizer))
    return apply_to(fitted(plan, set(job.modules_named())), plan, job)


def apply_to(part: Plan, plan: Plan, job: Job) -> Job:
    """Applies a plan, or its part that fits one of several models, and marks recordings accordingly.

    Raises:
        PolicyError: A policy does not fit; nothing has been changed.
    """
    try:
        job.modules_named()
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        raise PolicyError(
            f"a plan finds modules by their names, and torch cannot list those of {type(job.model).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error
    part.apply(job)
    for remark in (("plan", plan_to_tables(plan)), *(("notes", note) for note in job.notes)):
        job.on_undo(partial(remove_remark, add_remark(*remark, about=job.model)))
    job.on_note = partial(_remark_later, job)
    return job


def _remark_later(job: Job, sentence: str) -> None:
    job.on_undo(partial(remove_remark, add_remark("notes", sentence, about=job.model)))


def check_model(prediction: Prediction | None, model: torch.nn.Module) -> None:
    """Rejects a model that a plan was not made for.

    Raises:
        PolicyError: Its type or the size of its parameters differs; the message says which.
    """
    mismatch = find_mismatch(prediction, model)
    if mismatch:
        raise PolicyError(f"the plan was made for another model: {mismatch}. {_remedy()}")


def find_mismatch(prediction: Prediction | None, model: torch.nn.Module) -> str:
    """Returns how a model differs from the one a plan was made for; "" if it matches or the plan does not record it."""
    if prediction is None:
        return ""
    model = unwrapped(model)
    name = type(model).__name__
    # If the recorded model was wrapped, the plan contains only the wrapper's type.
    if prediction.model and prediction.model != name and prediction.model not in WRAPPERS:
        return f"for {prediction.model}, and this is {name}"
    size = parameter_bytes(model)
    if prediction.parameter_bytes and size != prediction.parameter_bytes:
        there = format_bytes(prediction.parameter_bytes)
        here = format_bytes(size)
        if there == here:
            there, here = f"{prediction.parameter_bytes:,} B", f"{size:,} B"
        return f"for {prediction.model or 'one'} with {there} of parameters, and this has {here}"
    return ""


def parameter_bytes(model: torch.nn.Module) -> int:
    """Returns a model's parameter bytes; shared parameters count once per module that holds them, as in a recording."""
    return sum(map(parameter_bytes_of, modules_of(model)))


def _remedy() -> str:
    return "Predict it again for this model: memprof predict RUN --plan PLAN --write PLAN"


def optimizers_in(
    given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Returns the given optimizers as a list: none, one or several."""
    if given is None:
        return []
    # Optimizer wrappers are not instances of the class, but have parameter groups.
    if hasattr(given, "param_groups"):
        return [cast(torch.optim.Optimizer, given)]
    return list(given)


@dataclass(frozen=True)
class CalledModel:
    """A model that is called, and its position in the module that contains it.

    Attributes:
        called: The module that is called.
        top: The outermost module that contains it, often itself.
        place: Its qualified name there, "" if it is the outermost one.
        title: Prefix of the names in ``top`` in a recording of several models: its type, numbered.
    """

    called: torch.nn.Module
    top: torch.nn.Module
    place: str
    title: str

    def holds(self, pattern: str) -> bool:
        """Whether a pattern matches anything in the outermost module, called or not."""
        names = module_names(self.top)
        prefixes = ("", self.title)
        found = any(_match(pattern, _names_under(prefix, names, pattern)) for prefix in prefixes)
        return found or self.find(pattern) is not None

    def trains(self, pattern: str) -> bool:
        """Whether a pattern matches a module with trained parameters in the outermost module, by its name there."""
        names = [name for name, module, _ in named_modules_of(self.top) if is_trained(module)]
        return any(_match(pattern, _names_under(prefix, names, pattern)) for prefix in ("", self.title))

    def find(self, pattern: str) -> list[str] | None:
        """Finds the modules that match a pattern.

        A recording names modules relative to the outermost one, so those names come first: if ``agent.act`` calls
        ``agent.actor``, ``*`` matches the actor and not each of its layers.

        Returns:
            None if none matches; an empty list if the pattern matches as written; otherwise the names of modules that
            match under a recording's names (``Generator.layers.*`` in a job with several models).
        """
        names = module_names(unwrapped(self.called))
        wrappers = ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module")
        for prefix in dict.fromkeys((self.place, "", self.title, _joined(self.title, self.place), *wrappers)):
            full = _names_under(prefix, names, pattern, holds_itself=prefix == self.place)
            found = _match(pattern, full)
            if found:
                return [full[name] for name in found] if prefix else []
        return None


def called_models(called: torch.nn.Module) -> Iterator[CalledModel]:
    """Yields the called model, then every other live model with parameters; frozen ones come last."""
    tops = outermost_modules()
    if all(module is not called for top in tops for module in modules_of(top)):
        # Modules that contain one another have no outermost one.
        yield CalledModel(called, called, "", type(called).__name__)
    numbers: dict[str, int] = {}
    others, frozen = [], []
    for top in tops:
        kind = type(top).__name__
        numbers[kind] = numbers.get(kind, 0) + 1
        # As the trace names them: the type, numbered from its second instance on.
        title = kind if numbers[kind] == 1 else f"{kind}#{numbers[kind]}"
        place = next((name for name, module, _ in named_modules_of(top) if module is called), None)
        if place is not None:
            yield CalledModel(called, top, place, title)
        elif is_trained(top):
            others.append(CalledModel(top, top, "", title))
        elif next(parameters_of(top), None) is not None:
            frozen.append(CalledModel(top, top, "", title))
    yield from others
    yield from frozen


def module_names(module: torch.nn.Module) -> list[str]:
    """Returns the qualified names of a module and all modules in it."""
    return [name for name, _, _ in named_modules_of(module)]


def _names_under(prefix: str, names: Iterable[str], pattern: str, *, holds_itself: bool = False) -> dict[str, str]:
    """Returns modules by their names under a prefix, "." for the model itself.

    Under its type as prefix, the model itself has a name that wildcards must not match; inside another module,
    wildcards may match it (``holds_itself``).
    """
    is_named = holds_itself or not prefix or "*" not in pattern
    return {_joined(prefix, name): name or "." for name in names if name or is_named}


def _match(pattern: str, names: Iterable[str]) -> list[str]:
    try:
        return match_modules([pattern], names)
    except PolicyError:
        return []


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def is_trained(module: torch.nn.Module) -> bool:
    """Returns whether any parameter of a module requires gradients."""
    with torch._C.DisableTorchFunction():  # otherwise the job's torch function modes or subclasses would see this read
        return any(parameter.requires_grad for parameter in parameters_of(module))
