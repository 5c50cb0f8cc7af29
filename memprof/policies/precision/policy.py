"""Runs forward in a lower-precision floating point type, under autocast or with weights of that type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Candidates, Policy

if TYPE_CHECKING:
    from memprof.trace.step import Step

# Why fp16 is refused, in predictions and in runs.
CREATE_GRAPH = (
    "precision: gradients are computed with create_graph=True, which fp16 loss scaling does not support; write "
    "dtype = 'bf16'."
)
NOT_OF_OUTPUT = (
    "precision: part of the loss does not come from the model's output (a penalty on weights, or a tensor that a hook "
    "or an attribute took out of the model), and loss scaling for fp16 would lose its gradient; return it from "
    "forward, or write dtype = 'bf16'."
)
LBFGS = (
    "precision: LBFGS runs the model several times per step, which fp16 loss scaling does not support; write "
    "dtype = 'bf16'."
)
#: Why bf16 is refused on GPUs before Ampere, where torch emulates it: slower than fp32, with workspaces not predicted.
NO_BF16 = "precision: this GPU does not support bf16; write dtype = 'fp16'."
#: The short forms, and the settings they stand for.
FLAGS = {"bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32"), "pure-bf16": ("bf16", "bf16")}
#: Time of operators as a share of float32's, coarsely. A device's are bound by their bytes (its products are not, where
#: its rates were recorded); on a CPU, median of the sample jobs in bf16.
DEVICE_TIME, CPU_TIME = 0.5, 0.8


@dataclass(frozen=True)
class Precision(Policy):
    """Runs forward in a lower-precision floating point type, under autocast or with weights of that type.

    Attributes:
        dtype: Compute type: ``bf16`` or ``fp16``. With fp16 the gradients are scaled inside the model, as by
            ``torch.amp.GradScaler``, to avoid underflow.
        weights: Type of parameters, gradients and optimizer state: ``fp32`` keeps them and computes under
            ``torch.autocast``; ``bf16`` makes all of them short (pure bf16).
    """

    name: ClassVar[str] = "precision"
    flag_words: ClassVar[tuple[str, ...]] = tuple(FLAGS)
    frameworks_set_it: ClassVar[bool] = True
    set_in_framework: ClassVar[Mapping[str, str]] = {
        "lightning": "the Trainer runs training_step, not the module. Set precision='bf16-mixed', or '16-mixed'.",
    }
    tried_by_default: ClassVar[bool] = True
    changes_kernels: ClassVar[bool] = True
    flag_help: ClassVar[str] = "compute in lower precision: bf16, fp16, or pure-bf16 (weights too)"
    flag_example: ClassVar[str] = "bf16"
    numerics: ClassVar[str] = "rounding"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.20, 0.40)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.28, 0.38)
    why_not_torch: ClassVar[str] = ""
    changes_forward: ClassVar[bool] = True

    dtype: str = "bf16"
    weights: str = "fp32"

    def __post_init__(self) -> None:
        """Validates the settings."""
        if self.dtype not in ("bf16", "fp16"):
            raise PolicyError(f"precision: unknown dtype {self.dtype!r}; write 'bf16' or 'fp16'.")
        if self.weights not in ("fp32", "bf16"):
            raise PolicyError(f"precision: unknown weights {self.weights!r}; write 'fp32' or 'bf16'.")
        if self.weights == "bf16" and self.dtype != "bf16":
            raise PolicyError("precision: weights = 'bf16' requires bf16 compute; write dtype = 'bf16' with it.")

    @property
    def is_pure(self) -> bool:
        """Whether parameters, gradients and optimizer state are short too."""
        return self.weights != "fp32"

    @property
    def torch_name(self) -> str:
        """Torch's name of the compute type."""
        return {"bf16": "bfloat16", "fp16": "float16"}[self.dtype]

    @property
    def needs_optimizer(self) -> bool:
        """Whether the optimizer's state is shortened, too."""
        return self.is_pure

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``bf16``, ``fp16`` or ``pure-bf16``.

        Raises:
            PolicyError: The text is none of them.
        """
        if text not in FLAGS:
            raise PolicyError(f"unknown --precision {text!r}; write one of {', '.join(FLAGS)}.")
        dtype, weights = FLAGS[text]
        return cls(dtype=dtype, weights=weights)

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        """Returns the applicable reduced precisions: none where the job already computes in one.

        What counts is the type of the numbers: fused attention also writes the state of its random numbers, as
        integers.
        """
        rules, bf16 = cls._module("transform"), cls("bf16")
        types = rules.product_types(step)
        if reason := rules.why_not_compiled(step, bf16):
            return Candidates(unsuitable={bf16: reason})
        if reduced := rules.short_types(types):
            return Candidates(unsuitable={bf16: f"the job's matrix products are in {reduced} already."})
        if not types & {"float32", "float64"}:
            return Candidates(unsuitable={bf16: "forward has no matrix products or convolutions in float32."})
        return Candidates((bf16,)) if step.runs_bf16() else Candidates((cls("fp16"),), {bf16: NO_BF16})

    @property
    def caveat(self) -> str:
        """What the scaling of fp16 gradients does to updates."""
        return "an update whose fp16 gradients overflow is skipped" if self.dtype == "fp16" else ""

    def describe(self) -> str:
        """Describes the policy: ``precision bf16``."""
        return f"precision {'pure-' if self.is_pure else ''}{self.dtype}"
