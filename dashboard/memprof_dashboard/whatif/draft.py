"""A plan put together by hand: what may be chosen for a recording, and its prediction, drawn over the timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from memprof.analysis.plans.basis import Basis, basis_of
from memprof.analysis.plans.predict import Forecast, forecast
from memprof.errors import PolicyError
from memprof.planners.search.effects import Maker, find_options
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Floats, Ints
from memprof_dashboard.figures.overlay import Curve, shares
from memprof_dashboard.sources import Rank
from memprof_dashboard.whatif.dry_frames import DryFrames
from memprof_dashboard.whatif.planning import basis_for

#: In a view's text: between choices, between a policy and its modules, and between modules.
_AND, _OF, _COMMA = ";", "=", ","
#: Modules of one group offered one by one, at most.
_MOST_MEMBERS = 64
#: Of more recorded steps the fullest alone is predicted: a tick has to be answered at once.
_MOST_STEPS = 16

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, eq=False)
class ModuleChoice:
    """A policy for modules that can be chosen.

    Attributes:
        name: The policy's name.
        make: Makes the policy for some modules.
        modules: Patterns and names of modules, with their labels.
    """

    name: str
    make: Maker
    modules: dict[str, str]


@dataclass(frozen=True, eq=False)
class Offer:
    """What a plan of a recording may be made of.

    Attributes:
        settings: Policies for the whole step, by their description.
        choices: Policies for chosen modules, by their name.
    """

    settings: dict[str, Policy]
    choices: dict[str, ModuleChoice]

    def text_of(self, ticked: Iterable[str], modules: Mapping[str, Iterable[str]]) -> str:
        """Returns a choice as the view holds it."""
        chosen = set(ticked)
        words = [text for text in self.settings if text in chosen]
        for name, choice in self.choices.items():
            picked = set(modules.get(name, ()))
            if own := [module for module in choice.modules if module in picked]:
                words.append(f"{name}{_OF}{_COMMA.join(own)}")
        return _AND.join(words)

    def chosen_in(self, text: str) -> tuple[list[str], dict[str, list[str]]]:
        """Reads a view's text: the descriptions and, by policy, the modules; what is not offered is left out."""
        ticked, modules = [], {}
        for word in text.split(_AND):
            name, _, names = word.partition(_OF)
            if word in self.settings:
                ticked.append(word)
            elif name in self.choices:
                modules[name] = [one for one in names.split(_COMMA) if one in self.choices[name].modules]
        return ticked, modules

    def policies_of(self, text: str) -> tuple[Policy, ...]:
        """Returns the policies of a view's text, in the order in which they are applied."""
        ticked, modules = self.chosen_in(text)
        made = [self.settings[word] for word in ticked]
        made += [self.choices[name].make(tuple(names)) for name, names in modules.items() if names]
        order = {kind: place for place, kind in enumerate(policy_types())}
        return tuple(sorted(made, key=lambda policy: order[type(policy)]))


@lru_cache(maxsize=8)
def _basis(rank: Rank) -> Basis:
    if int((rank.steps.first_op_id != NONE).sum()) <= _MOST_STEPS:
        return basis_for(rank)
    number = rank.fullest_number()
    # From a trace whose tables are dropped afterwards: the page needs this step alone.
    basis = basis_of(rank.trace.fresh(rank.trace.rank), number)
    warning = f"predicted for step {number} alone, the fullest; a search for plans considers all of them."
    return replace(basis, warnings=(*basis.warnings, warning))


@lru_cache(maxsize=8)
def offer_of(rank: Rank) -> Offer:
    """Returns what a plan of a recording may be made of.

    Raises:
        MemprofError: The recording holds no whole step, or is damaged.
    """
    step = _basis(rank).step
    world_size = max(rank.trace.manifest.world_size, 1)
    found = [one for kind in policy_types() for one in kind.candidates(step, world_size=world_size).whole_step]
    choices: dict[str, ModuleChoice] = {}
    for option in find_options(step, policy_types()):
        if len(option.makers) > 1:
            continue
        name = option.policies[0].name
        choice = choices.setdefault(name, ModuleChoice(name, option.makers[0], {}))
        if option.group.is_whole:
            choice.modules.setdefault(option.group.pattern, f"{option.group.pattern} ({len(option.group.members)})")
        if not option.group.is_whole or len(option.members) <= _MOST_MEMBERS:
            choice.modules.update({member: member for member in sorted(option.members, key=_by_number)})
    return Offer({one.describe(): one for one in found}, choices)


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def draft_of(rank: Rank, text: str, dry_frames: DryFrames) -> Forecast | None:
    """Predicts the plan of a view's text; None where it contains no policy.

    Policies that change kernels are estimated, until the dry run of the job that this starts has ended.

    Raises:
        MemprofError: A policy does not apply to the step or contradicts another one, or the recording is damaged.
        PolicyError: The text names a policy or a module that is not offered.
    """
    if not text:
        return None
    with _ONE_AT_A_TIME:  # the timeline and the page ask for the same one
        return _predicted(rank, text, dry_frames, dry_frames.finished)


@lru_cache(maxsize=16)
def _predicted(rank: Rank, text: str, dry_frames: DryFrames, _: int) -> Forecast:
    """Predicts a plan, again after each dry run that ends."""
    offer = offer_of(rank)
    policies = offer.policies_of(text)
    if not policies or offer.text_of(*offer.chosen_in(text)) != text:
        raise PolicyError("the plan in this address is not one that can be chosen for this recording.")
    plan = Plan(policies=policies)
    basis, estimated = dry_frames.basis(rank, _basis(rank), plan)
    made = forecast(rank.trace, plan, basis)
    return replace(made, warnings=(*made.warnings, estimated)) if estimated else made


def predicted_line(rank: Rank, made: Forecast) -> tuple[Floats, Ints]:
    """Lays a predicted step over the recorded one, phase by phase where both run the same.

    Returns:
        Where each predicted operator begins, in the recording's operators, with the end behind the last, shape
        ``(ops + 1,)``; and the bytes alive during each, shape ``(ops,)``.
    """
    history = rank.history
    first, end = rank.step_range(made.step.number)
    names = np.array(history.phases, dtype=np.object_)
    recorded = Curve("recorded", history.total[first:end], names[history.phase[first:end]])
    predicted = live_bytes(made.step).during
    _, laid, _ = shares(recorded, Curve("predicted", predicted, made.step.ops.phase))
    return first + laid / 100 * (end - first), predicted
