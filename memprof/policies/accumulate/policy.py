"""The accumulate policy: micro-batches whose gradients are accumulated before one update, and why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy

if TYPE_CHECKING:
    from memprof.trace.step import Step

LBFGS = (
    "accumulate does not support LBFGS, which calls its closure many times in a step; use another optimizer, or "
    "evaluate the whole batch in the closure."
)
DROPPED = (
    "accumulate cannot keep this job's gradients: its loop clears some with zero_grad() before any "
    "step() has used them, as when two networks train in turn; train without accumulate."
)
CHANGED = (
    "accumulate cannot keep this job's gradients: its loop changes them between backward and step(), which would "
    "happen once for each micro-batch. Clip with torch.nn.utils.clip_grad_norm_, which is delayed until they are "
    "complete, or train without accumulate."
)
BY_HAND = (
    "accumulate sums the gradients that backward() writes to p.grad, but this loop sets gradients itself "
    "(torch.autograd.grad, torch.func) before step(). Call backward(), or train without accumulate."
)
NOT_A_MEAN = (
    "accumulate cannot split a loss computed from gradients of the parameters (torch.autograd.grad with "
    "create_graph=True): it is not a mean over the samples. Train without accumulate."
)
WEIGHED = (
    "accumulate cannot split a loss whose weights are computed from gradients of the parameters "
    "(torch.autograd.grad before backward): each micro-batch would have weights of its own. Train without accumulate."
)
IN_TURN = (
    "accumulate does not fit this loop: it calls backward() again after step() on the same batch, as when two networks "
    "train in turn, but micro-batches update once, after the last of them; train without accumulate."
)
HOOKS = (
    "accumulate: a hook runs when a gradient is complete (register_post_accumulate_grad_hook) and would run once for "
    "each micro-batch; use register_hook, or train without accumulate."
)
IN_EVALUATION = "the model was in evaluation mode when the DataLoader yielded them"


def left_whole(why: str, micro_batches: int) -> str:
    """Returns the sentence for batches that are not split.

    Args:
        why: The reason, a clause.
        micro_batches: Number of micro-batches wanted.
    """
    return (
        f"accumulate cannot split this job's batches: {why}; in the training loop, write "
        f"'for part in memprof.micro_batches(batch, {micro_batches}):' around forward, backward and step()."
    )


@dataclass(frozen=True)
class Accumulate(Policy):
    """Splits each batch into micro-batches and accumulates their gradients before one update.

    Gradients equal those of the mean over the whole batch up to rounding; BatchNorm in training mode sees fewer samples
    at a time, and dropout draws different numbers.

    Attributes:
        micro_batches: Parts per batch, 2 or more; where they do not divide it, the first ones are one sample larger.
            A batch with fewer samples has one part per sample.
    """

    name: ClassVar[str] = "accumulate"
    live_refusal: ClassVar[str] = "batches are split from the first one of a loop on"
    frameworks_set_it: ClassVar[bool] = True
    set_in_framework: ClassVar[Mapping[str, str]] = {
        "hf": "the Trainer counts batches itself. Divide per_device_train_batch_size by the number of micro-batches "
        "and multiply gradient_accumulation_steps by it.",
        "lightning": "the Trainer counts batches itself. Divide the DataLoader's batch size by the number of "
        "micro-batches and set accumulate_grad_batches.",
    }
    tried_by_default: ClassVar[bool] = True
    changes_kernels: ClassVar[bool] = True
    divides_batches: ClassVar[bool] = True
    has_candidates: ClassVar[bool] = True
    flag_help: ClassVar[str] = "Split each batch into this many micro-batches and update once for all of them."
    flag_example: ClassVar[str] = "4"
    numerics: ClassVar[str] = "rounding"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.05, 0.12)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.3, 0.5)
    handles_saved: ClassVar[bool] = True
    why_not_torch: ClassVar[str] = ""
    starts_early: ClassVar[bool] = True  # the loop takes its first batch, which is split too, before it calls the model

    micro_batches: int = 2

    def __post_init__(self) -> None:
        """Validates the setting."""
        if type(self.micro_batches) is not int or self.micro_batches < 2:
            raise PolicyError(
                f"accumulate cannot split a batch into {self.micro_batches!r} micro-batches; "
                "write a whole number of 2 or more: micro_batches = 4."
            )

    @property
    def caveat(self) -> str:
        """How the loop sees the micro-batches."""
        return (
            f"the job's loop counts each of the {self.micro_batches} micro-batches as a batch: it prints and averages "
            "per micro-batch, and if it ends after a number of batches, it makes fewer updates"
        )

    def changes(self, step: Step) -> tuple[str, ...]:
        """Returns what micro-batches change beyond rounding."""
        found: tuple[str, ...] = self._module("candidates").changes(step, self)
        return found

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Parses ``--accumulate 4``.

        Raises:
            PolicyError: It is not an integer above 1.
        """
        try:
            number = int(text)
        except ValueError:
            raise PolicyError(
                f"--accumulate takes a whole number of micro-batches, not {text!r}; write --accumulate 4."
            ) from None
        return cls(micro_batches=number)

    def describe(self) -> str:
        """Returns the number of parts per batch in words."""
        return f"accumulate {self.micro_batches} micro-batches"
