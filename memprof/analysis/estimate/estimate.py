"""The estimate: every term of one rank, their sum, and how it compares with a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from memprof.analysis.estimate.model import Model
from memprof.analysis.estimate.states import count, state_terms
from memprof.analysis.estimate.terms import GROUPS, Setting, Term, sum_terms
from memprof.analysis.estimate.transformer import Transformer
from memprof.machines.catalogue import Accelerator

#: Largest number of ranks tried to find a fit.
MOST_RANKS = 65_536


@dataclass(frozen=True)
class Estimate:
    """Estimated training memory of a model, by formulas.

    Attributes:
        model: The model.
        setting: How it is trained.
        terms: Every nonzero term of one rank, by group.
    """

    model: Model
    setting: Setting
    terms: tuple[Term, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return count(self.model.parameters)

    @property
    def total_bytes(self) -> int:
        """Sum of all groups: an upper bound on the peak, as far as the formulas hold."""
        return sum(self.by_group.values())

    @cached_property
    def by_group(self) -> dict[str, int]:
        """Bytes by group of terms (GROUPS), including groups of 0 bytes."""
        return {group: sum_terms(term for term in self.terms if term.group == group) for group in GROUPS}

    @cached_property
    def moments(self) -> dict[str, int]:
        """Bytes at each candidate for the peak, where gradients are freed before forward (torch's default).

        ``loss``: end of forward, with the loss's own tensors; gradients only where micro-batches accumulate them.
        ``backward``: with recompute, all gradients already counted. ``update``: no activations.
        """
        groups, gradients = self.by_group, self.by_group["gradients"]
        kept = groups["weights"] + groups["optimizer"] + self.kept_bytes
        found = {
            "loss": kept + self._temporaries("loss") + (gradients if self.setting.micro_batches > 1 else 0),
            "update": groups["weights"] + gradients + groups["optimizer"],
        }
        if self.setting.checkpoint != "none":
            found["backward"] = kept + gradients + self._temporaries("backward")
        return found

    @property
    def fullest_bytes(self) -> int:
        """Bytes at the fullest of the moments: at most the total."""
        return max(self.moments.values())

    def _temporaries(self, moment: str) -> int:
        return sum(term.bytes for term in self.terms if term.group == "temporaries" and term.moment in ("", moment))

    @property
    def kept_bytes(self) -> int:
        """Bytes saved for backward: the layers' activations and those of the ends."""
        return self.by_group["activations"] + self.by_group["ends"]

    @property
    def letters(self) -> dict[str, int]:
        """Symbols of the formulas, with their values."""
        parts = [one.on_rank(self.setting.tensor_ranks) for one in self.model.parameters]
        found = {"P": count(parts)}
        if self.setting.zero:
            found["N"] = self.setting.ranks
        return found | self.model.letters(self.setting)


def estimate(model: Model, setting: Setting) -> Estimate:
    """Estimates the memory of one rank.

    Raises:
        UsageError: A setting has no formula for this kind of model.
    """
    terms = (*state_terms(model.parameters, setting), *model.terms(setting))
    ordered = sorted((term for term in terms if term.bytes), key=lambda term: GROUPS.index(term.group))
    return Estimate(model, setting, tuple(ordered))


@dataclass(frozen=True)
class OnMachine:
    """An estimate compared with a machine's memory available for tensors.

    Attributes:
        machine: The machine.
        share: Bytes of one rank as a share of that memory.
        least_ranks: Fewest data-parallel ranks over which a rank fits, at as many machines times the tensor-parallel
            ranks; None where no number up to MOST_RANKS suffices.
        zero: The ZeRO stage of ``least_ranks``: the requested one if any, else 3.
    """

    machine: Accelerator
    share: float
    least_ranks: int | None
    zero: int

    @property
    def fits(self) -> bool:
        """Whether a rank fits under the requested setting."""
        return self.share <= 1


def on_machine(found: Estimate, machine: Accelerator) -> OnMachine:
    """Compares an estimate with a machine, and finds the number of machines needed.

    Args:
        found: The estimate; tokens per rank stay the same for any number of ranks.
        machine: The machine.
    """
    budget, zero = machine.budget_bytes, found.setting.zero or 3
    ranks = _least_ranks(found, budget, zero)
    if not ranks and zero < 3:
        zero = 3
        ranks = _least_ranks(found, budget, zero)
    return OnMachine(machine, found.total_bytes / budget, ranks or None, zero)


def _least_ranks(found: Estimate, budget_bytes: int, zero: int) -> int:
    """Returns the fewest ranks over which a rank fits, 0 where none do: bytes decrease monotonically with ranks."""

    def fits(ranks: int) -> bool:
        stage = zero if ranks > 1 else 0
        return estimate(found.model, replace(found.setting, zero=stage, ranks=ranks)).total_bytes <= budget_bytes

    if fits(1):
        return 1
    low, high = 1, 2
    while not fits(high):
        low, high = high, high * 2
        if high > MOST_RANKS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def describe_setting(setting: Setting, model: Model) -> str:
    """Returns a one-line description of the training setting."""
    shape = model.shape
    words = []
    if isinstance(shape, Transformer):
        samples = setting.samples
        batch = f"{setting.tokens:,} tokens in samples of {setting.length:,}" if samples is None else ""
        words.append(batch or f"batch {samples:,} of {setting.length:,} tokens")
    elif not isinstance(shape, int):
        words.append(f"batch {setting.tokens:,}")
    words += [f"in {setting.micro_batches} micro-batches"] if setting.micro_batches > 1 else []
    words += [setting.precision.name, setting.optimizer]
    if isinstance(shape, Transformer):
        words.append("flash attention" if setting.has_flash else "attention with materialized scores")
        has_dropout = setting.has_dropout and (shape.has_dropout or shape.has_attention_dropout)
        words.append("dropout" if has_dropout else "no dropout")
    if setting.checkpoint == "selective":
        words.append("attention's core recomputed")
    elif setting.checkpoint == "layers":
        words.append("layers recomputed" if setting.every == 1 else f"every {setting.every} layers recomputed")
    words += [f"tensor parallel over {setting.tensor_ranks}"] if setting.tensor_ranks > 1 else []
    words += ["sequence parallel"] if setting.is_sequence_parallel else []
    words += [f"ZeRO {setting.zero} over {setting.ranks:,} ranks"] if setting.zero else []
    words += [f"{setting.ranks:,} replicas"] if setting.ranks > 1 and not setting.zero else []
    words += ["on the CPU"] if setting.is_on_cpu else []
    return ", ".join(words)
