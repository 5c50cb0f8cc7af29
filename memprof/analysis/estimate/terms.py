"""A term of an estimate, and the training settings that it depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from memprof.errors import UsageError
from memprof.json_values import LEFT_OUT, key

#: Groups of terms, in display order.
GROUPS = ("weights", "gradients", "optimizer", "activations", "ends", "temporaries")


@dataclass(frozen=True)
class Term:
    """One term of an estimate, for one rank.

    Attributes:
        group: Its group (GROUPS): ``activations`` is what the model's layers save for backward, ``ends`` what
            embedding, head and loss save, ``temporaries`` what is live only briefly.
        name: Its name, a few words.
        bytes: Its size.
        formula: How the size follows from the shape, in the symbols of `memprof.analysis.estimate.letters`.
        source: The publication of the formula, or the torch behaviour it follows from.
        not_when: When it does not hold, a clause; "" where it always does.
        moment: When a temporary is live: of temporaries at different moments only the largest sum counts; "" for any
            moment.
    """

    group: str
    name: str
    bytes: int
    formula: str
    source: str
    not_when: str = ""
    moment: str = field(default="", metadata=LEFT_OUT)


def sum_terms(terms: Iterable[Term]) -> int:
    """Sums terms; of temporaries at different moments, only the moment with the most bytes counts."""
    always, moments = 0, Counter[str]()
    for term in terms:
        if term.moment:
            moments[term.moment] += term.bytes
        else:
            always += term.bytes
    return always + max(moments.values(), default=0)


@dataclass(frozen=True)
class Precision:
    """Bytes per value, by use.

    Attributes:
        name: Its name on the command line.
        weights: A weight read in forward.
        gradients: A gradient.
        master: The optimizer's own fp32 copy of a weight; 0 where there is none.
        states: A value of the optimizer state.
        casts: A 16-bit copy of a matrix product's weight, kept for the step; 0 where there is none.
        stream: A value of the residual stream, which normalisation reads.
        products: An input of matrix products and activation functions.
        softmax: The output of softmax on a GPU; as ``products`` on the CPU.
        loss: A value saved by the cross-entropy.
        source: The publication that describes it.
    """

    name: str
    weights: int
    gradients: int
    master: int
    states: int
    casts: int
    stream: int
    products: int
    softmax: int
    loss: int
    source: str


_MICIKEVICIUS = (
    "Micikevicius et al. 2018, Mixed Precision Training, section 3.1; Rajbhandari et al. 2020, ZeRO, section 3.1"
)
_AMP = "torch.amp: fp32 weights, each product's weight cast once and kept until autocast ends"

PRECISIONS: dict[str, Precision] = {
    one.name: one
    for one in (
        Precision("fp32", 4, 4, 0, 4, 0, 4, 4, 4, 4, "4 bytes per number (IEEE 754 binary32)"),
        Precision("fp16", 2, 2, 0, 2, 0, 2, 2, 2, 2, "2 bytes per number (IEEE 754 binary16)"),
        Precision("bf16", 2, 2, 0, 2, 0, 2, 2, 2, 2, "2 bytes per number (bfloat16)"),
        Precision("fp16-mixed", 2, 2, 4, 4, 0, 2, 2, 2, 4, _MICIKEVICIUS),
        Precision("bf16-mixed", 2, 2, 4, 4, 0, 2, 2, 2, 4, _MICIKEVICIUS),
        Precision("fp16-autocast", 4, 4, 0, 4, 2, 4, 2, 4, 4, _AMP),
        Precision("bf16-autocast", 4, 4, 0, 4, 2, 4, 2, 4, 4, _AMP),
    )
}

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adam8bit", "adafactor")

CHECKPOINTS = ("none", "selective", "layers")


@dataclass(frozen=True)
class Setting:
    """How a model is trained; all figures are per rank.

    Attributes:
        tokens: Tokens per rank and update; samples, for models without a sequence.
        length: Tokens per sample; 1 for models without a sequence.
        micro_batches: Parts of the batch that run one after the other.
        precision: Types.
        optimizer: One of OPTIMIZERS.
        checkpoint: What backward recomputes (CHECKPOINTS): nothing, the core of attention, or whole layers.
        every: Layers per checkpoint, for ``layers``.
        zero: What data-parallel ranks shard: nothing (0), optimizer state (1), gradients too (2), weights too (3).
        ranks: Data-parallel ranks.
        tensor_ranks: Tensor-parallel ranks, which divide each layer.
        is_sequence_parallel: Whether sequence parallelism divides what tensor parallelism replicates.
        has_flash: Whether attention uses a kernel that never materializes its scores.
        has_dropout: Whether dropout is enabled where the model has it.
        is_on_cpu: On the CPU, dropout saves a mask as wide as the values; on a GPU 1 byte per value.
    """

    tokens: int
    length: int = 1
    micro_batches: int = 1
    precision: Precision = field(default=PRECISIONS["fp32"], metadata=key(convert=lambda precision: precision.name))
    optimizer: str = "adamw"
    checkpoint: str = "none"
    every: int = field(default=1, metadata=key("checkpoint_every"))
    zero: int = 0
    ranks: int = 1
    tensor_ranks: int = 1
    is_sequence_parallel: bool = field(default=False, metadata=key("sequence_parallel"))
    has_flash: bool = field(default=True, metadata=key("flash"))
    has_dropout: bool = field(default=True, metadata=key("dropout"))
    is_on_cpu: bool = field(default=False, metadata=key("device", lambda on_cpu: "cpu" if on_cpu else "cuda"))

    def __post_init__(self) -> None:
        """Rejects contradictory settings.

        Raises:
            UsageError: Names the two settings.
        """
        if self.zero and self.ranks == 1:
            raise UsageError(f"ZeRO {self.zero} needs more than one rank: add --ranks N.")
        if self.is_sequence_parallel and self.tensor_ranks == 1:
            raise UsageError("sequence parallelism needs tensor-parallel ranks: add --tensor-parallel N.")
        parts = self.tokens if self.samples is None else self.samples
        if self.micro_batches > parts:
            raise UsageError(f"{parts} samples cannot be split into {self.micro_batches} micro-batches.")
        if self.checkpoint == "selective" and self.has_flash:
            raise UsageError(
                "selective checkpointing recomputes attention scores, which a flash kernel already does: "
                "leave it out, or add --no-flash."
            )

    @property
    def tokens_at_once(self) -> int:
        """Tokens (samples, for models without a sequence) of the largest micro-batch."""
        samples = self.samples
        if samples is None:
            return -(-self.tokens // self.micro_batches)
        return -(-samples // self.micro_batches) * self.length

    @property
    def samples(self) -> int | None:
        """Samples per rank; None where the tokens are not a whole number of samples."""
        return self.tokens // self.length if self.tokens % self.length == 0 else None

    def mask_bytes(self, values: int) -> int:
        """Returns the bytes dropout saves per value, given the size of a value in bytes."""
        return values if self.is_on_cpu else 1

    @property
    def loss_bytes(self) -> int:
        """Bytes per log-probability; autocast on a GPU keeps both the product's output and its cast for the loss."""
        casts = bool(self.precision.casts) and not self.is_on_cpu
        return self.precision.loss + (self.precision.products if casts else 0)

    @property
    def softmax_bytes(self) -> int:
        """Bytes per value of softmax's output."""
        return self.precision.products if self.is_on_cpu else self.precision.softmax
