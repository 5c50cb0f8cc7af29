"""Plans the evictions of a step whose operators are known, and the keys by which plans name its saved tensors."""

from __future__ import annotations

import math
import random
from collections import Counter

from memprof.errors import PolicyError
from memprof.policies.evict.outline import Outline
from memprof.policies.evict.simulation import Course, Rule, Simulation
from memprof.trace.schema import NONE, Texts
from memprof.trace.step import Step

#: Powers of the time until the next use.
_FORESIGHTS = (1.0, 0.5)
#: Most variations tried, and most operators simulated in all of them together: planning takes about a second at most.
_VARIATIONS, _OPERATORS = 24, 40_000
_FACTORS = (0.1, 0.3, 3.0, 10.0, 100.0)


def planned_course(outline: Outline, budget_bytes: int, heuristic: str, at_once: frozenset[int]) -> Course:
    """Returns the course with the least recomputation that was found.

    The runtime's rule, which does not know the rest of the step, comes first, so that the result is never worse. Then
    victims are chosen by the time until their next use. Last, the costs of single storages are raised or lowered, at
    random from a fixed seed, and a variation that recomputes less is kept.

    Args:
        outline: The step.
        budget_bytes: Maximum bytes at once; 0 for no limit.
        heuristic: A name in ``HEURISTICS``.
        at_once: Storages that are dropped once nothing else references them.

    Raises:
        PolicyError: An operator does not fit even with everything possible dropped, or the step's work is repeated many
            times over, whatever the rule.
    """
    rules = [Rule(heuristic), *(Rule(heuristic, foresight) for foresight in _FORESIGHTS)]
    if heuristic == "eq-class":
        rules.append(Rule("msps"))
    best: Course | None = None
    best_rule = rules[0]
    refusal = ""
    for rule in rules:
        try:
            course = Simulation(outline, budget_bytes, rule, at_once, math.inf if best is None else best.again_us).run()
        except PolicyError as error:
            refusal = refusal or str(error)  # the error would keep this frame and its callers' alive
            continue
        if best is None or course.again_us < best.again_us:
            best, best_rule = course, rule
        if not course.dropped:
            return course
    if best is None:
        raise PolicyError(refusal)
    return _varied(outline, budget_bytes, best, best_rule, at_once)


def _varied(outline: Outline, budget_bytes: int, best: Course, rule: Rule, at_once: frozenset[int]) -> Course:
    candidates = [storage for storage, may_go in enumerate(outline.may_go) if may_go]
    chance = random.Random(0)
    for _ in range(min(_VARIATIONS, _OPERATORS // len(outline.cost_us))):
        if not best.again_us:
            break
        again = sorted(set(best.dropped))
        weights = dict(rule.weights)
        for _ in range(chance.choice((1, 1, 2, 3))):
            storage = chance.choice(again if chance.random() < 0.7 else candidates)
            weights[storage] = weights.get(storage, 1.0) * chance.choice(_FACTORS)
        varied = Rule(rule.heuristic, rule.foresight, weights)
        try:
            course = Simulation(outline, budget_bytes, varied, at_once, best.again_us).run()
        except PolicyError:
            continue
        if course.again_us <= best.again_us:
            best, rule = course, varied
    return best


def key_of(module: str, operator: str, number: int) -> str:
    """Returns the key of one run of an operator: ``layers.0.mlp.0:aten.addmm.default:0``.

    Args:
        module: Name of the innermost module that runs it, "" outside of modules or for the root.
        operator: The operator.
        number: Number of earlier runs of the operator in that module, within this call of the model.
    """
    return f"{module}:{operator}:{number}"


def keys_of(step: Step) -> list[str]:
    """Returns the key of each operator of a step in its first forward run, "" for all others."""
    ops = step.ops
    modules: Texts = step.modules.name
    counts: Counter[tuple[int, str, str]] = Counter()
    keys = []
    for phase, again, module, name, part in zip(
        ops.phase.tolist(),
        ops.is_recompute.tolist(),
        ops.module_id.tolist(),
        ops.name.tolist(),
        ops.micro_batch.tolist(),
        strict=True,
    ):
        if phase != "forward" or again:
            keys.append("")
            continue
        title = str(modules[module]) if module != NONE else ""
        number = counts[part, title, name]
        counts[part, title, name] = number + 1
        keys.append(key_of(title, name, number))
    return keys
