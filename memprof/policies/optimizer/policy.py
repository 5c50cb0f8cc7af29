"""Defines the optimizer policy: 8-bit or host state, the loop over parameters, and updates inside backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy

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
    has_candidates: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "Change the optimizer: in-backward, foreach, fused or loop, 8bit or host, separated by commas."
    )
    flag_example: ClassVar[str] = "in-backward,foreach"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.3, 0.2)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.4, 0.2)

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
    def needs_optimizer(self) -> bool:
        """Always."""
        return True

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

    @property
    def takes_host(self) -> bool:
        """Whether the state is in host memory."""
        return self.state == "host"

    def describe(self) -> str:
        """Describes the policy: ``optimizer in-backward, foreach``."""
        words = [_IN_BACKWARD] if self.in_backward else []
        return "optimizer " + ", ".join(word for word in (*words, self.loop, self.state) if word)
