"""Applies a plan to the models of a recorded job, each on its first training call."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

from memprof.errors import MemprofError, NoOptimizerError
from memprof.launch.apply import (
    CalledModel,
    apply_to,
    called_models,
    check_model,
    find_mismatch,
    is_trained,
    module_names,
)
from memprof.launch.outcome.plan_marks import end_at_policy_errors, mark_applied, mark_idle, policy_at_fault, refuse
from memprof.policies.plan.patterns import match_modules
from memprof.policies.plan.plan import Plan, choosing, patterns_of
from memprof.policies.plan.plan_file import parse_plan
from memprof.policies.plan.prediction import Prediction
from memprof.policies.runtime.job import Effect, Job
from memprof.recorder.calls.modules import is_within_constructor
from memprof.recorder.faults import is_from_signal_handler
from memprof.recorder.memory.live_objects import live_objects, outermost_modules
from memprof.recorder.memory.tensor_memory import modules_of, parameters_of


class UnderPlan:
    """Applies a plan to the models of this process.

    A model is the outermost module of a call with gradients enabled, if any of its parameters is trained: loss modules,
    frozen teachers and evaluation are left alone. If a job trains several models, each gets the policies whose patterns
    match it, and a policy without patterns applies to all. A frozen model that gradients run through, such as a loss
    network, gets the policies whose patterns match it and no trained model.

    Some scripts create their optimizers only after the first loss (Pyro creates one for each parameter). If a policy
    needs an optimizer and there is none, the plan is applied at the model's next call, i.e. from the second step on. If
    torch.func.functional_call has replaced the model's parameters during the call, it is applied after the update.
    """

    def __init__(self, plan: Plan, spool: Path) -> None:
        """Stores the plan; no model is changed before it is called.

        Args:
            plan: The plan.
            spool: The recording's spool folder, from which the parent reads the plan's status.
        """
        self._plan = plan
        self._spool = spool
        self._known: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._applied: set[int] = set()
        self._waits: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._refusal = ""
        self._is_settled = False
        self._effects: list[Effect] = []
        self._idle: list[str] = []
        end_at_policy_errors(spool)
        plan.start()

    def before_call(self, module: torch.nn.Module) -> None:
        """Applies the plan to a model on its first training call.

        Raises:
            SystemExit: The plan does not fit; the job ends here, before its first step.
            Exception: Raised by a signal handler of the job; nothing was applied.
        """
        if self._refusal:
            self.refuse(self._refusal)
        known = self._known.get(id(module))
        if known is not None and known() is module:
            return
        if is_within_constructor():
            return  # seen again when it trains, with all its modules by then
        before = dict(self._known)
        self._register(module)
        if not _is_outermost():
            return
        if is_trained(module):
            self._try(module, before)
        elif self._names_frozen(module):
            if _has_begun():
                self._try(module, before)
            else:  # it may compute data for a model that does not exist yet
                self._known = before

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies the plan, from the second step on, to an optimizer's model if no call of the model was seen.

        Some modules are never called in a way that torch sees: GPyTorch and Keras modules have their own ``__call__``,
        and scripts may run ``model.forward(batch)``, or other methods.

        Raises:
            SystemExit: The plan does not fit; the job ends here.
        """
        if self._refusal:
            self.refuse(self._refusal)
        done = {each.without for each in self._effects if each.is_done}  # in another copy of the model, perhaps
        idle = [*dict.fromkeys(each.without for each in self._effects if each.is_tried and each.without not in done)]
        if idle != self._idle:
            self._idle = idle
            mark_idle(self._spool, idle)
        if self._is_settled:
            return
        self._is_settled = True
        model = _model_of(optimizer, self._plan.prediction)
        if model is not None:
            self._try(model, dict(self._known))

    def _try(self, module: torch.nn.Module, before: dict[int, weakref.ref[torch.nn.Module]]) -> None:
        """Applies the plan to a model.

        Raises:
            SystemExit: The plan does not fit.
            Exception: Raised by a signal handler of the job; nothing was applied.
        """
        # torch.func.functional_call puts other tensors in the places of parameters.
        has_own = all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters_of(module))
        if not has_own and self._waits.get(id(module)) is module:
            self._known = before
            return
        self._is_settled = has_own
        try:
            self._apply(module)
            self._is_settled = True
        except NoOptimizerError as error:
            if self._waits.get(id(module)) is module:
                self.refuse(str(error), policy_at_fault(error))
            self._waits[id(module)] = module
            self._known = before
        except MemprofError as error:
            self.refuse(str(error), policy_at_fault(error))
        except Exception as error:  # a job must not run without the plan it was given
            if is_from_signal_handler(error):
                self._known = before  # if the job continues, the plan is applied at the next call
                raise
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            self.refuse(
                f"the plan could not be applied: {type(error).__name__}: {error}. This is a fault of memprof, not of "
                "your job; MEMPROF_DEBUG=1 shows where it is.",
                policy_at_fault(error),
            )

    def refuse(self, sentence: str, policy: str = "") -> NoReturn:
        """Ends the job, and every further attempt to train.

        Args:
            sentence: The reason.
            policy: Name of the policy at fault, "" if unknown.

        Raises:
            SystemExit: Always.
        """
        self._refusal = sentence
        refuse(sentence, self._spool, policy)

    def _apply(self, module: torch.nn.Module) -> None:
        models = list(called_models(module))
        self._check_models(models)
        part, chosen = self._part_for(models)
        for inner in modules_of(module):
            self._register(inner)
        if not part.policies:
            return
        self._effects += apply_to(part, self._plan, Job(module, _optimizers_of(module))).effects
        self._applied |= chosen
        mark_applied(self._spool, sorted(self._applied))

    def _check_models(self, models: list[CalledModel]) -> None:
        """Rejects a job in which no model matches the one the plan was made for."""
        prediction = self._plan.prediction
        # Checked once: pure-bf16 halves the bytes of a model that is checked again when another one is called.
        if prediction is None or self._applied:
            return
        if any(not find_mismatch(prediction, model.top) for model in models):
            return
        if not any(not find_mismatch(prediction, model.called) for model in models):
            named = [model.top for model in models if type(model.top).__name__ == prediction.model]
            check_model(prediction, named[0] if named else models[0].top)

    def _names_frozen(self, module: torch.nn.Module) -> bool:
        """Whether a pattern of the plan matches a module of this frozen model, and none of a trained one."""
        patterns = [pattern for policy in self._plan.policies for pattern in patterns_of(policy)]
        if not patterns or next(parameters_of(module), None) is None:
            return False
        models = list(called_models(module))
        return any(_find(pattern, models) is not None for pattern in patterns)

    def _part_for(self, models: list[CalledModel]) -> tuple[Plan, set[int]]:
        """Returns the plan for the called model, the first of several, and the indices of its policies.

        Raises:
            PolicyError: A pattern matches no module of any model.
        """
        policies, chosen = [], set()
        is_frozen = not is_trained(models[0].called)
        for number, policy in enumerate(self._plan.policies):
            patterns = patterns_of(policy)
            if is_frozen and not patterns:
                continue
            names: list[str] = []
            is_as_written = True
            for pattern in patterns:
                if not any(model.holds(pattern) for model in models):
                    match_modules([pattern], module_names(models[0].top))  # raises, and suggests near matches
                here = _find(pattern, models)
                is_as_written &= here == []
                names += [pattern] if here == [] else here or []
            if not patterns or is_as_written:
                policies.append(policy)
            elif names:
                policies.append(choosing(policy, names))
            else:
                continue
            chosen.add(number)
        return Plan(tuple(policies)), chosen

    def _register(self, module: torch.nn.Module) -> None:
        self._known[id(module)] = weakref.ref(module)


def under_plan(text: str, spool: Path) -> UnderPlan:
    """Prepares to apply a plan, given as TOML.

    Raises:
        SystemExit: The plan cannot be read in this process; the job ends.
    """
    try:
        return UnderPlan(parse_plan(text), spool)
    except Exception as error:  # noqa: BLE001 - a job must not run without the plan it was given
        refuse(f"the plan cannot be read in the job: {error}", spool)


def _find(pattern: str, models: list[CalledModel]) -> list[str] | None:
    """Finds a pattern's modules in the called model, the first; None if it is frozen and a trained one has matches.

    A frozen model may be a copy of a trained one, as a moving average: the pattern then means the one that is trained.
    """
    called, *others = models
    if is_trained(called.called):
        return called.find(pattern)
    is_of_trained = called.trains(pattern) or any(is_trained(model.top) and model.holds(pattern) for model in others)
    return None if is_of_trained else called.find(pattern)


def _is_outermost() -> bool:
    """Whether no other module's call is in progress on this thread."""
    code = torch.nn.Module._call_impl.__code__
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


def _has_begun() -> bool:
    """Whether there is anything to train: a model, or what an optimizer updates, such as an image."""
    return bool(live_objects(torch.optim.Optimizer)) or any(is_trained(module) for module in outermost_modules())


def _model_of(optimizer: torch.optim.Optimizer, prediction: Prediction | None) -> torch.nn.Module | None:
    """Returns the outermost module with a parameter of an optimizer, preferably the one that the plan was made for."""
    own = _updated_by(optimizer.param_groups)
    found = [module for module in outermost_modules() if not own.isdisjoint(map(id, parameters_of(module)))]
    fitting = [module for module in found if not find_mismatch(prediction, module)]
    return next(iter(fitting or found), None)


def _optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Returns the live optimizers with any of a model's parameters."""
    own = set(map(id, parameters_of(model)))
    found = live_objects(torch.optim.Optimizer)
    return [each for each in found if not own.isdisjoint(_updated_by(vars(each).get("param_groups", ())))]


def _updated_by(groups: Iterable[dict[str, Any]]) -> set[int]:
    return {id(each) for group in groups for each in group.get("params", ())}
