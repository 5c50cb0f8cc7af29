"""Dry-runs a job under torch.compile, with lower activation budgets until the peak is within a budget in bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.dry_steps import steps_at
from memprof.launch.dry.job_server import DryRequest, DryRuns
from memprof.launch.torch_versions import as_numbers
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import default_policies
from memprof.policies.rewrite.stack_marks import may_be_compiled
from memprof.policies.runtime.model_names import module_names, without_wrappers
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes, live_bytes_by_category
from memprof.replay.time import product_kinds
from memprof.trace.step import Step

#: The first torch whose compiler can limit what fusion adds to a peak.
_LIMITS_FUSION = (2, 15)
#: Policies that can be combined with the compiler, as can moving the optimizer's state; others change what it compiles.
_COMBINABLE = (Precision, ChunkedLoss, OptimizerPolicy)


@dataclass(frozen=True)
class CompiledPlans:
    """The compiled plans that were dry-run.

    Attributes:
        steps: Their steps, by their policies.
        reason: Why there is none, a sentence; "" where there is one.
        is_cut: Whether the search ended for lack of time.
    """

    steps: DrySteps = field(default_factory=dict)
    reason: str = ""
    is_cut: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """The reason, and that the search ended early, as warnings."""
        none = (f"no compiled plan was dry-run: {self.reason}",) if self.reason else ()
        dry_runs = "1 dry run" if len(self.steps) == 1 else f"{len(self.steps)} dry runs"
        cut = (f"--time-limit ended the search for compiled plans after {dry_runs}.",) if self.is_cut else ()
        return (*none, *cut)


def compiled_plans(
    found: Suggestion,
    most: int,
    run: DryRuns,
    is_late: Callable[[], bool] = lambda: False,
) -> CompiledPlans:
    """Dry-runs the job with its whole model compiled, alone and combined with policies of the best plan.

    The compiler's budget is a share of what it would save by default, and the peak need not fall with it
    (https://github.com/pytorch/pytorch/issues/197838), so the peak of each share is that of its own dry run. The next
    one lies where the peaks so far point to (``share_search``). So does the number of layers that are checkpointed
    inside what is compiled: the compiler then recomputes these whole layers, in the code that it generates.

    Args:
        found: The search result for the job as it is.
        most: Maximum number of dry runs for each set of other policies.
        run: Makes dry runs of the job.
        is_late: Whether no other dry run may start.
    """
    is_own = compiles_itself(found.basis.step)
    trial = _Trial(found, run, is_late, is_own=is_own)
    is_gated = as_numbers(found.manifest.torch_version) >= _LIMITS_FUSION
    others: tuple[Policy, ...] = ()
    sets = list(_combinable(found, is_own=is_own))
    for others in [each for each in sets if trial.is_in_reach(each)] or sets:
        if trial.descend(partial(_at_share, others), most) or (is_gated and trial.fits(_without_growth(others))):
            return trial.plans()
        if is_own and others and trial.has_fit:  # what remains is predicted to be slow
            break
    layers = repeated_layers(found.basis.step) if _allows(found, Checkpoint) else ()
    if layers:
        trial.descend(partial(_at_layers, others, layers), most)
    return trial.plans()


def _at_share(others: tuple[Policy, ...], share: float) -> tuple[Policy, ...]:
    return (*others, Compile(activation_budget=share))


def _without_growth(others: tuple[Policy, ...]) -> tuple[Policy, ...]:
    """Returns a plan whose compiler fuses no kernels where that raises a graph's peak, and recomputes nothing."""
    return (*others, Compile(fusion_gb=0.0))


def _at_layers(others: tuple[Policy, ...], layers: tuple[str, ...], share: float) -> tuple[Policy, ...]:
    """Returns a plan in which a share of the layers, the last ones, is not checkpointed."""
    count = len(layers) - round(share * len(layers))
    return (*others, *((Checkpoint(layers[:count]),) if count else ()), Compile())


class _Trial:
    """Dry runs under plans that compile, each plan once."""

    def __init__(
        self,
        found: Suggestion,
        run: DryRuns,
        is_late: Callable[[], bool],
        *,
        is_own: bool,
    ) -> None:
        self._found = found
        self._run = run
        self._is_late, self._is_cut = is_late, False
        self._steps: dict[tuple[Policy, ...], tuple[Step, ...]] = {}
        request = found.answer.search_request
        self._budget_bytes, self._counts_reserved = request.budget_bytes, request.counts_reserved
        step = found.basis.step
        kept = live_bytes_by_category(step).get("activation", np.zeros(len(step.ops), dtype=np.int64))
        self._kept_bytes = int(kept.max(initial=0))
        self._other_bytes = int((live_bytes(step).during - kept).max(initial=0))
        self._peaks: dict[tuple[Policy, ...], int | None] = {}
        self._own_bytes: dict[tuple[Policy, ...], int] = {}
        if is_own:  # it was recorded compiled, and its best plan predicted so
            best = found.answer.best or found.answer.least
            self._own_bytes = {(): found.basis.peak_bytes, best.policies: best.interval.most_bytes}
            for policies, peak in self._own_bytes.items():  # with what it reserves, it does not fit
                self._peaks[(*policies, Compile())] = max(peak, request.budget_bytes + 1)
        self._reason = ""

    def plans(self) -> CompiledPlans:
        """Returns the plans that were dry-run."""
        return CompiledPlans(self._steps, "" if self._steps else self._reason, self._is_cut)

    def is_in_reach(self, policies: tuple[Policy, ...]) -> bool:
        """Whether a job that compiles itself could fit if the compiler kept nothing for backward; True if unknown."""
        if policies not in self._own_bytes:
            return True
        return self._other_bytes - (self._own_bytes[()] - self._own_bytes[policies]) <= self._budget_bytes

    @property
    def has_fit(self) -> bool:
        """Whether a plan fits."""
        return any(peak is not None and peak <= self._budget_bytes for peak in self._peaks.values())

    def fits(self, policies: tuple[Policy, ...]) -> bool:
        """Dry-runs the job under one more plan, if there is time; returns whether it fits."""
        policies = Plan(policies).policies
        if policies not in self._peaks and not self._is_late():
            self._peaks[policies] = self._measured(policies)
        peak = self._peaks.get(policies)
        return peak is not None and peak <= self._budget_bytes

    def descend(self, plan: Callable[[float], tuple[Policy, ...]], most: int) -> bool:
        """Dry-runs the job at one share after the other, ``most`` times; returns whether it fits at the whole."""
        shares = search_shares(self._budget_bytes, self._kept_bytes)
        share, runs = next(shares), 0
        while True:
            policies = Plan(plan(share)).policies
            if policies not in self._peaks:
                if runs == most:
                    return False
                if self._is_late():
                    self._is_cut = True
                    return False
                self._peaks[policies] = self._measured(policies)
                runs += 1
            peak = self._peaks[policies]
            if peak is None or (peak <= self._budget_bytes and share == 1.0):
                return peak is not None
            try:
                share = shares.send(peak)
            except StopIteration:
                return False

    def _measured(self, policies: tuple[Policy, ...]) -> int | None:
        """Dry-runs the job under a plan; returns what has to fit, None if that is not known."""
        outcome, made = _dry_run(self._found, policies, self._run)
        if made is None or outcome.peak_bytes is None:
            self._reason = self._reason or outcome.reason or "the dry run has no step on the recorded inputs."
            return None
        self._steps[policies] = made
        return max(outcome.peak_bytes, outcome.reserved_bytes if self._counts_reserved else 0)


def _combinable(found: Suggestion, *, is_own: bool) -> Iterator[tuple[Policy, ...]]:
    """Yields the sets of other policies to compile with: none, and those of the best plan that can be combined.

    For a job that compiles itself, no plan in another precision is predicted, so that is tried, too.
    """
    yield ()
    others = tuple(policy for policy in (found.answer.best or found.answer.least).policies if _is_combinable(policy))
    if others:
        yield others
    if is_own and _allows(found, Precision) and (precision := short_precision(found.basis.step)):
        yield precision
        yield from ((*precision, *others),) if others else ()


def _allows(found: Suggestion, kind: type[Policy]) -> bool:
    request = found.answer.search_request
    return kind.name in (request.allow or default_policies()) and kind.name not in request.forbid


def _is_combinable(policy: Policy) -> bool:
    return isinstance(policy, _COMBINABLE) or (isinstance(policy, Swap) and policy.what == "optimizer")


def _dry_run(
    found: Suggestion, policies: tuple[Policy, ...], run: DryRuns
) -> tuple[DryOutcome, tuple[Step, ...] | None]:
    with tempfile.TemporaryDirectory(prefix="memprof-dry-") as folder:
        path = Path(folder, "dry.memprof")
        (outcome,) = run([DryRequest(Plan(policies), path)])
        return steps_at(policies, path, outcome, found.basis, found.manifest)


#: The search ends when the largest share that fits is known to this accuracy.
_ACCURACY = 0.1
#: The share of the budget that the next peak is to have, and the one from which on a plan that fits is kept.
_AIM, _CLOSE = 0.97, 0.95
#: Nearest that the next share comes to one that was tried, of the range between those that fit and do not.
_MARGIN = 0.2


def search_shares(budget_bytes: int, kept_bytes: int) -> Generator[float, int, None]:
    """Yields shares from 0 to 1, the largest first; the caller sends the peak of each, in bytes.

    The next share is where the line through the nearest peaks meets the budget; before there are two, the peak is
    assumed to fall evenly by ``kept_bytes``. The peak need not fall evenly, nor at all: where the same end of the range
    has moved twice, the range is halved, and a share with a higher peak than a larger one is its lower end. If nothing
    above such a share fits, those below it are tried, and 0 last.
    """
    over = yield 1.0
    if over <= budget_bytes:
        return
    above, below, under = 1.0, 0.0, 0
    slope, moved, is_again, rises = float(kept_bytes), "", False, False
    lowest, peak_of_lowest = 1.0, over
    while above - below > _ACCURACY and under < _CLOSE * budget_bytes:
        gap, aim = above - below, _AIM * budget_bytes
        if is_again or (not under and (rises or slope <= 0)):
            guess = (above + below) / 2
        elif under:
            guess = below + gap * (aim - under) / (over - under)
        else:
            guess = above - (over - aim) / slope
        share = round(min(max(guess, below + _MARGIN * gap), above - _MARGIN * gap), 2)
        peak = yield share
        if share < lowest:
            lowest, peak_of_lowest = share, peak
        if peak <= budget_bytes:
            end, below, under = "below", share, peak
        elif peak > over and not under:
            end, below, rises = "below", share, True
        else:
            slope = (over - peak) / (above - share)
            end, above, over = "above", share, peak
        moved, is_again = end, end == moved
        if rises and not under and above - below <= _ACCURACY:
            above, below, over = lowest, 0.0, peak_of_lowest
            slope, moved, is_again, rises = 0.0, "", False, False
    if not under:
        yield 0.0


def compiles_itself(step: Step) -> bool:
    """Returns whether forward runs code that the job compiles."""
    return bool(np.any(may_be_compiled(step) & (step.ops.phase == "forward")))


def short_precision(step: Step) -> tuple[Precision, ...]:
    """Returns the precision to try for a job that computes in float32; none for others."""
    is_product = (step.ops.flops > 0) & (step.ops.phase == "forward")
    kinds = set(product_kinds(step)[is_product])
    return (Precision("bf16" if step.runs_bf16() else "fp16"),) if kinds == {"fp32"} else ()


def repeated_layers(step: Step) -> tuple[str, ...]:
    """Returns the names of a model's layers: the list of modules of one type with the most parameters, in order."""
    modules, names = step.modules, [without_wrappers(name) for name in module_names(step)]
    inside = modules.parameter_bytes.copy()
    for row, parent in reversed(list(enumerate(modules.parent_id.tolist()))):  # parents precede their children
        if parent >= 0:
            inside[parent] += inside[row]
    lists: dict[tuple[int, str], list[int]] = {}
    for row, (parent, kind) in enumerate(zip(modules.parent_id.tolist(), modules.type.tolist(), strict=True)):
        if names[row].rpartition(".")[2].isdigit():
            lists.setdefault((parent, str(kind)), []).append(row)
    layers = max((rows for rows in lists.values() if len(rows) > 1), key=lambda rows: inside[rows].sum(), default=[])
    return tuple(names[row] for row in layers)
