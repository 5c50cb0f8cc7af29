"""A model to estimate: its name, its parameters, and the terms that follow from its layers."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.estimate import network, transformer_terms
from memprof.analysis.estimate.network import Network
from memprof.analysis.estimate.parameters import Parameter
from memprof.analysis.estimate.setting import Setting
from memprof.analysis.estimate.spelling import read_count
from memprof.analysis.estimate.term import Term
from memprof.analysis.estimate.transformer import Transformer
from memprof.errors import UsageError


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: Its name.
        shape: Its shape; a number where only the parameter count is known.
        source: Source of the shape, "" where the user gave it.
        notes: Caveats, as clauses.
    """

    name: str
    shape: Transformer | Network | int
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""
        if isinstance(self.shape, int):
            return (Parameter("parameters", (self.shape,), is_product=True, is_split=True),)
        return self.shape.parameters

    @property
    def context(self) -> int:
        """Default tokens per sample; 1 for models without a sequence."""
        return self.shape.context if isinstance(self.shape, Transformer) else 1

    def terms(self, setting: Setting) -> tuple[Term, ...]:
        """Returns every term except weights, gradients and optimizer.

        Raises:
            UsageError: A setting has no formula for this kind of model.
        """
        if isinstance(self.shape, Transformer):
            return transformer_terms.transformer_terms(self.shape, setting)
        if isinstance(self.shape, Network):
            return network.network_terms(self.shape, setting)
        if setting.checkpoint != "none":
            raise UsageError("A parameter count alone gives no activations: give a model's shape to use checkpointing.")
        return ()

    def letters(self, setting: Setting) -> dict[str, int]:
        """Returns the symbols used in the formulas of its layers, with their values."""
        if isinstance(self.shape, Transformer):
            return transformer_terms.letters(self.shape, setting)
        return network.network_letters(setting) if isinstance(self.shape, Network) else {}


def model_of_count(text: str) -> Model:
    """Returns a model with only a parameter count.

    Args:
        text: Such as ``7B``, ``350M`` or ``6738415616``.

    Raises:
        UsageError: The text is not a number.
    """
    return Model(f"{text} parameters", read_count(text, "parameters"))
