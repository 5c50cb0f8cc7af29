"""Names of what a job does in its steps that no operator shows, as manifests hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: A hook of the job runs whenever a gradient is complete (``register_post_accumulate_grad_hook``).
GRADIENT_HOOKS = "gradient hooks"
#: Settings of an optimizer, such as its learning rate, change between backward and ``step()``.
CHANGES_SETTINGS = "settings changed after backward"
#: The job gives an optimizer another learning rate for each update, without a scheduler of torch.
SETS_LEARNING_RATE = "learning rate set for each update"
#: A model is trained in evaluation mode.
TRAINED_IN_EVALUATION = "trained in evaluation mode"
#: An optimizer has parameters that require gradients and have none, as those of a target network that the model
#: contains; the ids of their modules follow, -1 where no model contains them.
WITHOUT_GRADIENT = "parameters require gradients and have none, in modules:"
#: Python's garbage collector is switched off, or runs rarely.
COLLECTOR_OFF = "garbage collector off"
#: Modules whose gradient checkpointing is switched on train in evaluation mode; their ids follow.
IDLE_CHECKPOINTS = "checkpointing switched on in evaluation mode, in modules:"
#: torch.compile compiles a model, which this dry run runs eagerly.
COMPILES_MODELS = "compiles models"

#: Update forms that an optimizer may have beside a loop over its parameters.
FORMS = ("foreach", "fused")
#: Its ``step`` cannot be called without a closure.
NEEDS_CLOSURE = "closure"
#: It is LBFGS, or a subclass of it.
IS_LBFGS = "lbfgs"


@dataclass(frozen=True)
class OptimizerTraits:
    """An optimizer of a recorded job.

    Attributes:
        name: Name of its class.
        words: What its updates need or have: some of FORMS, NEEDS_CLOSURE, IS_LBFGS.
    """

    name: str
    words: frozenset[str]

    def has_form(self, loop: str) -> bool:
        """Whether its updates can be given a form: loop, foreach or fused."""
        return ("fused" if loop == "fused" else "foreach") in self.words


def modules_in(usages: Iterable[str], name: str) -> frozenset[int]:
    """Returns the ids of the modules that follow a name in a manifest's ``usages``."""
    listed = [each.removeprefix(name) for each in usages if each.startswith(name)]
    return frozenset(int(module) for text in listed for module in text.split())


def read_optimizers(described: Iterable[str]) -> Iterator[OptimizerTraits]:
    """Yields the optimizers of a manifest's ``optimizers``."""
    for each in described:
        name, *words = each.split(" ")
        yield OptimizerTraits(name, frozenset(words))
