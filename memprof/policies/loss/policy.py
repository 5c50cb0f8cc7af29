"""Computes cross-entropy over a few rows of the logits at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy


@dataclass(frozen=True)
class ChunkedLoss(Policy):
    """Computes cross-entropy over a few rows of the logits at a time.

    Attributes:
        chunks: Number of parts the rows are divided into.
        head: Pattern of the Linear that computes the logits, to compute them chunk by chunk, too; "" for none.
        minimum_bytes: Logits smaller than this are left alone.
    """

    name: ClassVar[str] = "loss"
    tried_by_default: ClassVar[bool] = True
    changes_kernels: ClassVar[bool] = True
    has_candidates: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "Compute cross-entropy in this many chunks of rows; append a comma and the name of the Linear that computes "
        "the logits to compute these in chunks, too."
    )
    flag_example: ClassVar[str] = "8,head"
    numerics: ClassVar[str] = "rounding"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.2, 0.2)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.3, 0.5)
    why_not_torch: ClassVar[str] = "torch cannot replace the cross-entropy that your script calls by a chunked one"

    chunks: int = 8
    head: str = ""
    minimum_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        """Checks the settings."""
        if type(self.chunks) is not int or self.chunks < 2:
            raise PolicyError(f"loss: invalid chunks {self.chunks!r}; write a whole number of at least 2.")
        if not isinstance(self.head, str):
            raise PolicyError(f"loss: invalid head {self.head!r}; write the name of a Linear.")
        if type(self.minimum_bytes) is not int or self.minimum_bytes < 0:
            raise PolicyError(f"loss: invalid minimum_bytes {self.minimum_bytes!r}; write a number of bytes.")

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``8`` or ``8,lm_head``.

        Raises:
            PolicyError: It does not begin with a number of chunks.
        """
        number, _, head = text.partition(",")
        try:
            chunks = int(number)
        except ValueError:
            raise PolicyError(
                f"--loss: invalid value {text!r}; write a number of chunks, such as 8, or 8,lm_head."
            ) from None
        return cls(chunks=chunks, head=head.strip())

    def describe(self) -> str:
        """Returns a short description: ``loss in 8 chunks with head``."""
        return f"loss in {self.chunks} chunks" + (f" with {self.head}" if self.head else "")
