"""A model to be estimated: what it is called, its parameters, and the terms that follow from its layers."""

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
        name: What it is called.
        shape: What is known of it; a number where its parameters alone are counted.
        source: Where the shape is from, "" where it was given.
        notes: What else must be known of it, clauses.
    """

    name: str
    shape: Transformer | Network | int
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter."""
        if isinstance(self.shape, int):
            return (Parameter("parameters", (self.shape,), is_product=True, is_split=True),)
        return self.shape.parameters

    @property
    def context(self) -> int:
        """Tokens of a sample where none are asked for; 1 for models that know no sequence."""
        return self.shape.context if isinstance(self.shape, Transformer) else 1

    def terms(self, setting: Setting) -> tuple[Term, ...]:
        """Returns every term but weights, gradients and optimizer.

        Raises:
            UsageError: Something is asked for that the model's kind has no formula for.
        """
        if isinstance(self.shape, Transformer):
            return transformer_terms.transformer_terms(self.shape, setting)
        if isinstance(self.shape, Network):
            return network.network_terms(self.shape, setting)
        if setting.checkpoint != "none":
            raise UsageError("Of a number of parameters alone no activations follow: give a shape to checkpoint.")
        return ()

    def letters(self, setting: Setting) -> dict[str, int]:
        """Returns the letters that the formulas of its layers are written in, with their values."""
        if isinstance(self.shape, Transformer):
            return transformer_terms.letters(self.shape, setting)
        return network.network_letters(setting) if isinstance(self.shape, Network) else {}


def model_of_count(text: str) -> Model:
    """Returns a model of which only the number of parameters is known.

    Args:
        text: Such as ``7B``, ``350M`` or ``6738415616``.

    Raises:
        UsageError: The text is no number.
    """
    return Model(f"{text} parameters", read_count(text, "parameters"))
