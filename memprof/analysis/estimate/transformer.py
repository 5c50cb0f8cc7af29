"""The shape of a transformer, and the parameters that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memprof.analysis.estimate.states import Parameter
from memprof.errors import UsageError

NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "relu", "silu")


@dataclass(frozen=True)
class Transformer:
    """A transformer: an embedding, identical layers of attention and MLP, a head.

    Attributes:
        layers: Number of layers.
        width: Width of the residual stream, h.
        heads: Attention heads, a.
        vocabulary: Vocabulary size, v.
        kv_heads: Heads of keys and values; fewer than ``heads`` under grouped-query attention, 0 for the same number.
        head_width: Width of a head; 0 for width / heads.
        inner: Width inside the MLP; 0 for 4 h.
        positions: Learned position embeddings; 0 for none (rotary).
        segments: Token types with an embedding (BERT); 0 for none.
        is_gated: Whether the MLP is gated (SwiGLU).
        activation: One of ACTIVATIONS.
        norm: One of NORMS.
        has_bias: Whether the MLP's linear layers have a bias.
        has_qkv_bias: Whether queries, keys and values have one.
        has_out_bias: Whether attention's output has one.
        is_fused_qkv: Whether queries, keys and values come from one matrix.
        is_tied: Whether the head shares the embedding's weight.
        has_head: Whether there is a head that predicts tokens.
        has_head_transform: Whether a dense layer with its own norm precedes the head, which has a bias (BERT).
        has_embedding_norm: Whether a norm follows the embedding.
        has_final_norm: Whether a norm precedes the head.
        has_pooler: Whether a dense layer reads the first token (BERT).
        has_dropout: Whether it is trained with dropout after embedding, attention and MLP.
        has_attention_dropout: Whether it is trained with dropout on the attention scores.
        context: Default tokens per sample.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    head_width: int = 0
    inner: int = 0
    positions: int = 0
    segments: int = 0
    is_gated: bool = False
    activation: str = "gelu"
    norm: str = "layer"
    has_bias: bool = True
    has_qkv_bias: bool = True
    has_out_bias: bool = True
    is_fused_qkv: bool = True
    is_tied: bool = True
    has_head: bool = True
    has_head_transform: bool = False
    has_embedding_norm: bool = False
    has_final_norm: bool = True
    has_pooler: bool = False
    has_dropout: bool = True
    has_attention_dropout: bool = True
    context: int = 1024

    def __post_init__(self) -> None:
        """Rejects impossible shapes.

        Raises:
            UsageError: Names the sizes.
        """
        for name in ("layers", "width", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(f"a transformer needs at least one of {name}, not {getattr(self, name)}.")
        for name in ("kv_heads", "head_width", "inner", "positions", "segments", "context"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} of a transformer must not be negative: {getattr(self, name)}.")
        if self.norm not in NORMS or self.activation not in ACTIVATIONS:
            raise UsageError(
                f"the norm is one of {', '.join(NORMS)}, the activation one of {', '.join(ACTIVATIONS)}; "
                f"not {self.norm} and {self.activation}."
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads do not divide into {self.kv_heads} groups of keys and values.")

    def check_heads(self) -> None:
        """Rejects a width that its heads do not divide, which no library builds; two rows of GPT-3's table have one.

        Raises:
            UsageError: Names both.
        """
        if not self.head_width and self.width % self.heads:
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads: give head_width.")

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_width if self.head_width else self.width

    @property
    def key_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def inner_width(self) -> int:
        """Width inside the MLP."""
        return self.inner or 4 * self.width

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters."""
        width, vocabulary = self.width, self.vocabulary
        ends = [Parameter("token embedding", (vocabulary, width), is_split=True)]
        ends += [Parameter("position embedding", (self.positions, width))] if self.positions else []
        ends += [Parameter("segment embedding", (self.segments, width))] if self.segments else []
        ends += self._norm("embedding norm", 1, layer=False) if self.has_embedding_norm else []
        ends += self._norm("final norm", 1, layer=False) if self.has_final_norm else []
        if self.has_pooler:
            ends += [Parameter("pooler", (width, width), is_product=True), Parameter("pooler bias", (width,))]
        return (*ends, *self._head(), *self._layer_parameters())

    def _head(self) -> list[Parameter]:
        width, vocabulary = self.width, self.vocabulary
        made = []
        if self.has_head_transform:
            made += [Parameter("head transform", (width, width), is_product=True)]
            made += [Parameter("head transform bias", (width,))]
            made += self._norm("head norm", 1, layer=False)
            made += [Parameter("head bias", (vocabulary,), is_split=True)]
        if self.has_head and not self.is_tied:
            made += [Parameter("head", (vocabulary, width), is_product=True, is_split=True)]
        return made

    def _layer_parameters(self) -> list[Parameter]:
        width, query, key, inner = self.width, self.query_width, self.key_width, self.inner_width
        made = self._norm("norms", 2, layer=True)
        products = {"qkv": query + 2 * key} if self.is_fused_qkv else {"query": query, "key": key, "value": key}
        for name, out in products.items():
            made += self._linear(name, out, width, has_bias=self.has_qkv_bias)
        made += self._linear("attention out", width, query, has_bias=self.has_out_bias, is_row=True)
        if self.is_gated:
            made += self._linear("MLP gate", inner, width, has_bias=self.has_bias)
        made += self._linear("MLP in", inner, width, has_bias=self.has_bias)
        made += self._linear("MLP out", width, inner, has_bias=self.has_bias, is_row=True)
        return made

    def _linear(self, name: str, out: int, width: int, *, has_bias: bool, is_row: bool = False) -> list[Parameter]:
        """Returns a linear layer's parameters; split by rows of its weight or, where ``is_row``, by its inputs.

        Weights have shape (out, in); for ``is_row`` the inputs come first here, so that the first size is divided,
        and the bias is replicated (Shoeybi et al. 2019, Megatron-LM, section 3).
        """
        shape = (width, out) if is_row else (out, width)
        made = [Parameter(name, shape, self.layers, layer=True, is_product=True, is_split=True)]
        if has_bias:
            made.append(Parameter(f"{name} bias", (out,), self.layers, layer=True, is_split=not is_row))
        return made

    def _norm(self, name: str, times: int, *, layer: bool) -> list[Parameter]:
        times *= self.layers if layer else 1
        made = [Parameter(name, (self.width,), times, layer=layer)]
        if self.norm == "layer":
            made.append(Parameter(f"{name} bias", (self.width,), times, layer=layer))
        return made
