"""The optimizer policy: 8-bit or host state, the loop over parameters, updates inside backward; why it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Candidates, Policy
from memprof.trace.usages import CHANGES_SETTINGS, NEEDS_CLOSURE, OptimizerTraits

if TYPE_CHECKING:
    from memprof.trace.step import Step

IN_HOST_MEMORY = "the parameters and the optimizer state are already in host memory; host changes nothing."
USED = (
    "a gradient is read or changed after backward: step-in-backward has already used and freed it. Leave "
    "in_backward out, or access it in a hook on the parameter (register_hook)."
)
SECOND_BACKWARD = (
    "a second backward ran before optimizer.step(): step-in-backward cannot accumulate gradients, because they are "
    "already used. Leave in_backward out, or do not accumulate gradients."
)
EARLY = (
    "parameters or optimizer state are accessed between backward and optimizer.step(): step-in-backward has already "
    "updated them. Leave in_backward out, or access them before backward or after the step."
)
#: Optimizers of torch whose fused form runs on a CPU only.
_FUSED_ON_CPU = ("Adagrad",)
AVERAGED = (
    "a gradient is read or changed inside backward after it was complete, as DistributedDataParallel does to average "
    "it: step-in-backward has already used it. Leave in_backward out, or shard instead."
)
DISTRIBUTED = (
    "DistributedDataParallel sums gradients after they are complete; a step inside backward would run before that. "
    "Use sharding, or leave in_backward out."
)
SCALED = (
    "a GradScaler scales the loss: step-in-backward would update with scaled gradients. Use bf16, which needs no "
    "scaling, or leave in_backward out."
)
NEVER_RESET = (
    "gradients are not reset between optimizer.step() and the next backward: step-in-backward cannot accumulate them, "
    "because they are already used. Leave in_backward out, or call zero_grad() in each step."
)
SETTINGS_CHANGED = (
    "the optimizer's settings (such as the learning rate) were changed between backward and optimizer.step(); "
    "step-in-backward used the old ones. Change them before backward."
)

FUSED_SGD = "torch's fused SGD does not update parameters of 16 bits on a CPU; write foreach, or leave loop out."
#: A note of runs, where gradients change: their updates run as without the policy.
NOT_FUSED = (
    "Some updates ran in a loop: a fused kernel would not update these parameters correctly, since their gradients are "
    "sparse or laid out in memory in another way."
)


def clipped(function: str) -> str:
    """Returns the sentence for gradients that a function of torch.nn.utils clips."""
    return (
        f"torch.nn.utils.{function} was called: step-in-backward cannot clip gradients, because they are already used. "
        "Leave in_backward out, or do not clip."
    )


TOGETHER = (
    "the optimizer computes a setting of its step, such as a rate, from the gradients or state of all parameters, "
    "as Prodigy does; it cannot update one parameter at a time. Leave in_backward, one_by_one and host out."
)


def needs_whole(kind: str) -> str:
    """Returns the sentence for an optimizer that cannot update without a closure."""
    return (
        f"{kind} recomputes the loss inside its step and needs all parameters there; it cannot update one parameter at "
        "a time. Leave in_backward, one_by_one and host out."
    )


def no_form(kind: str, loop: str) -> str:
    """Returns the sentence for an optimizer without an update form."""
    return f"{kind} has no {loop} form for these parameters; leave loop out."


def refuse_optimizers(step: Step, policy: OptimizerPolicy) -> None:
    """Rejects recorded optimizers that lack the update form, or that need all parameters at once or after backward.

    Raises:
        PolicyError: There is one.
    """
    if policy.in_backward and CHANGES_SETTINGS in step.usages:
        raise PolicyError(SETTINGS_CHANGED)
    if policy.in_backward and "DistributedDataParallel" in step.modules.type:
        raise PolicyError(DISTRIBUTED)
    for optimizer in step.optimizers:
        if policy.loop and not optimizer.has_form(policy.loop):
            raise PolicyError(no_form(optimizer.name, policy.loop))
        if policy.in_backward or policy.state == "host":
            refuse_closure(optimizer)


def refuse_closure(optimizer: OptimizerTraits) -> None:
    """Rejects a recorded optimizer that cannot update one parameter at a time, because it needs a closure.

    Raises:
        PolicyError: It does.
    """
    if NEEDS_CLOSURE in optimizer.words:
        raise PolicyError(needs_whole(optimizer.name))


STATES = ("8bit", "host")
LOOPS = ("foreach", "fused", "loop")
_IN_BACKWARD = "in-backward"


@dataclass(frozen=True)
class OptimizerPolicy(Policy):
    """Changes the optimizer's state, loop or time of update.

    Attributes:
        state: "" leaves it unchanged; "8bit" keeps state in 8 bits (torchao or bitsandbytes); "host" keeps it in host
            memory and copies one parameter's state to the device at a time.
        loop: "" leaves it unchanged; "foreach" updates all parameters at once, "fused" in one kernel, "loop" one after
            another.
        in_backward: Update each parameter as soon as backward has completed its gradient, then free the gradient.
    """

    name: ClassVar[str] = "optimizer"
    live_refusal: ClassVar[str] = "updates in backward end the job where its gradients are clipped or scaled"
    flag_words: ClassVar[tuple[str, ...]] = (_IN_BACKWARD, *LOOPS, *STATES)
    flag_is_list: ClassVar[bool] = True
    frameworks_set_it: ClassVar[bool] = True
    tried_by_default: ClassVar[bool] = True
    changes_kernels: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "Change the optimizer: in-backward, foreach, fused or loop, 8bit or host, separated by commas."
    )
    flag_example: ClassVar[str] = "in-backward,foreach"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.3, 0.2)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.4, 0.2)
    needs_optimizer: ClassVar[bool] = True

    state: str = ""
    loop: str = ""
    in_backward: bool = False

    def __post_init__(self) -> None:
        """Validates the settings."""
        if self.state not in ("", *STATES):
            raise PolicyError(f"optimizer: invalid state {self.state!r}; write one of {', '.join(STATES)}.")
        if self.loop not in ("", *LOOPS):
            raise PolicyError(f"optimizer: invalid loop {self.loop!r}; write one of {', '.join(LOOPS)}.")
        if not isinstance(self.in_backward, bool):
            raise PolicyError(f"optimizer: invalid in_backward {self.in_backward!r}; write true or false.")
        if not (self.state or self.loop or self.in_backward):
            words = ", ".join((_IN_BACKWARD, *LOOPS, *STATES))
            raise PolicyError(f"the optimizer policy changes nothing; write at least one of {words}.")
        if self.state and self.loop:
            raise PolicyError(
                f"optimizer: state {self.state} and loop {self.loop} are incompatible: the state determines the loop; "
                "write one of them."
            )

    @property
    def numerics(self) -> str:  # type: ignore[override]  # of the other policies it does not depend on the settings
        """Whether the update rounds differently, as fused kernels do, or keeps its state in 8 bits."""
        return "approximate" if self.state == "8bit" else "rounding"

    @property
    def excludes_sharding(self) -> bool:
        """Whether it changes more than the loop over parameters."""
        return bool(self.state) or self.in_backward

    @property
    def why_not_torch(self) -> str:
        """Why torch has no equivalent of the state; "" where that is unchanged."""
        return "torch's optimizers cannot keep their state in 8 bits or in host memory" if self.state else ""

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``in-backward,foreach``.

        Raises:
            PolicyError: A word is unknown, or two contradict each other.
        """
        words = [word.strip() for word in text.split(",") if word.strip()]
        known = (_IN_BACKWARD, *LOOPS, *STATES)
        for word in words:
            if word not in known:
                raise PolicyError(f"optimizer: unknown option {word!r}; write some of {', '.join(known)}.")
        states = [word for word in words if word in STATES]
        loops = [word for word in words if word in LOOPS]
        for chosen in (states, loops):
            if len(chosen) > 1:
                raise PolicyError(f"optimizer: options {' and '.join(chosen)} are incompatible; write one of them.")
        return cls(state="".join(states), loop="".join(loops), in_backward=_IN_BACKWARD in words)

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        """Returns updates within backward or of one parameter at a time, where the step has an optimizer.

        Adam, SGD and Adagrad can run as one kernel, faster and without temporaries; on a device, the state of any
        optimizer that needs no closure can be kept on the host.
        """
        if not (step.ops.phase == "optimizer").any():
            return Candidates(unsuitable={cls(in_backward=True): "no optimizer updates in this step."})
        alone = (cls(in_backward=True), cls(loop="loop"))
        known, on_device, both = step.optimizers, step.targets_device(), (True, False)
        fused, on_host = [], []
        is_known = bool(known) and not (on_device and any(each.name in _FUSED_ON_CPU for each in known))
        if is_known and all(each.has_form("fused") for each in known):
            fused = [cls(loop="fused", in_backward=early) for early in both]
        if on_device and known and not any(NEEDS_CLOSURE in each.words for each in known):
            on_host = [cls(state="host", in_backward=early) for early in both]
        return Candidates((*fused, *(() if fused and on_device else alone), *on_host))

    @property
    def takes_host(self) -> bool:
        """Whether the state is in host memory."""
        return self.state == "host"

    def describe(self) -> str:
        """Describes the policy: ``optimizer in-backward, foreach``."""
        words = [_IN_BACKWARD] if self.in_backward else []
        return "optimizer " + ", ".join(word for word in (*words, self.loop, self.state) if word)
