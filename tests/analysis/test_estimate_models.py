"""Shapes and their parameters: the models known by name, keys, config.json files and networks."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.analysis.estimate import model
from memprof.analysis.estimate.config_file import read_config
from memprof.analysis.estimate.estimate import estimate
from memprof.analysis.estimate.model import (
    Model,
    find_model,
    known_models,
    read_count,
    read_transformer,
)
from memprof.analysis.estimate.network import Network, read_perceptron
from memprof.analysis.estimate.states import count
from memprof.analysis.estimate.terms import PRECISIONS, Setting
from memprof.errors import BadInputError, MemprofError, UsageError

_CATALOGUE = tomllib.loads(Path(model.__file__).with_name("models.toml").read_text(encoding="utf-8"))["model"]


@pytest.mark.parametrize("name", [name for name in known_models() if "parameters" in _CATALOGUE[name]])
def test_a_known_model_has_the_parameters_its_source_counts(name: str) -> None:
    """The shape gives the published number, exactly."""
    assert count(find_model(name).parameters) == _CATALOGUE[name]["parameters"]


@pytest.mark.parametrize("name", [name for name in known_models() if name.startswith("gpt3")])
def test_gpt3_has_the_parameters_its_table_rounds_to(name: str) -> None:
    """Table 2.1's sizes are the shapes' to within 3 %, its own rounding: 125M, 350M, 760M, 1.3B ... 175B."""
    rounded = read_count(name.removeprefix("gpt3-"), "parameters")
    assert count(find_model(name).parameters) == pytest.approx(rounded, rel=0.03)


def test_parameters_of_a_layer_have_names() -> None:
    """Products of queries, keys and values are one matrix in GPT-2, and three in LLaMA; norms belong to the layers."""
    layer = [one.name for one in find_model("gpt2").parameters if one.layer]
    products = ["qkv", "attention out", "MLP in", "MLP out"]
    assert layer == ["norms", "norms bias", *(name for one in products for name in (one, f"{one} bias"))]
    layer = [one.name for one in find_model("llama2-7b").parameters if one.layer]
    assert layer == ["norms", "query", "key", "value", "attention out", "MLP gate", "MLP in", "MLP out"]


def test_tensor_parallelism_divides_matrices_and_pads_the_vocabulary() -> None:
    """Per rank of 2: halves of the matrices, all of norms and of the biases of their rows, 26 of 51 tokens."""
    shape = read_transformer("layers=1,width=8,heads=2,vocab=51")
    mine = count(one.on_rank(2) for one in shape.parameters)
    halves = (
        12 * 8 * 8 // 2 + (3 * 8 + 32) // 2
    )  # four matrices, biases of queries, keys, values and of the MLP's first
    whole = 8 + 8 + 2 * 2 * 8 + 2 * 8  # biases behind attention and MLP, three norms
    assert mine == halves + whole + 26 * 8


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    # Sizes and counts as published at huggingface.co; biases and ties by family.
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}, 124_439_808),
    "tinyllama": (
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 5632,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        1_100_048_384,
    ),
    "llama-3.2-1b": (
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "mistral-7b": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "qwen2-0.5b": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "bert": ({"model_type": "bert", "architectures": ["BertModel"]}, 109_482_240),
    "bert-masked": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, 109_514_298),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_gives_the_published_count(name: str, tmp_path: Path) -> None:
    """The file is read as data: keys of each family, with its usual values where a key is missing."""
    record, parameters = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(record))
    for path in (tmp_path / "config.json", tmp_path):
        assert count(read_config(path).parameters) == parameters


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "mamba"}', "supported: gpt2, llama, mistral, qwen2, bert"),
        ('{"hidden_size": 8}', "None"),
        ("[1, 2]", "no JSON object"),
        ("not json", "no JSON object"),
        ('{"model_type": ["gpt2"]}', "gpt2"),
        ('{"model_type": "llama"}', "num_attention_heads"),
        ('{"model_type": "gpt2", "n_layer": "twelve"}', "'n_layer'"),
        ('{"model_type": "gpt2", "n_layer": -1}', "'n_layer'"),
        ('{"model_type": "gpt2", "n_head": 7}', "7 heads"),
        ('{"model_type": "gpt2", "tie_word_embeddings": "no"}', "must be true, false or a share"),
    ],
)
def test_other_files_are_refused_with_a_sentence(text: str, says: str, tmp_path: Path) -> None:
    """What was read, what is wrong, what to do; never a guess."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="config") as error:
        read_config(path)
    assert says in str(error.value)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(max_size=3), st.lists(st.integers())
)
KEYS = st.sampled_from(["n_layer", "n_embd", "n_head", "n_inner", "attn_pdrop", "architectures"])


@given(record=st.dictionaries(KEYS, VALUES))
def test_any_values_are_read_or_refused(record: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A damaged config.json always results in an error message."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **record}))
    try:
        assert count(read_config(path).parameters) > 0
    except BadInputError as error:
        assert "config.json" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers=2,width=8,heads=2", "vocabulary"),
        ("layers=2,width=9,heads=2,vocab=5", "head_width"),
        ("layers=2,width=8,heads=2,vocab=5,layers=3", "twice"),
        ("layers=2,width=8,heads=2,vocab=5,colour=3", "colour"),
        ("layers=2,width=8,heads=2,vocab=5,tied=maybe", "yes or no"),
        ("layers=2,width=8,heads=2,vocab=5,norm=batch", "layer, rms"),
        ("layers=2,width=8,heads=2,vocab=5,style=gpt5", "gpt, llama, bert"),
        ("layers=x,width=8,heads=2,vocab=5", "invalid number of layers 'x'"),
        ("layers=2,width=8,heads=4,vocab=5,kv_heads=3", "3 groups"),
        ("", "invalid key=value"),
    ],
)
def test_shapes_that_are_none(text: str, says: str) -> None:
    """A sentence names the key."""
    with pytest.raises(UsageError, match=says):
        read_transformer(text)


def test_short_keys_speak_for_attention_too() -> None:
    """bias=no and dropout=0 hold for the layer, unless attention's are given by themselves."""
    one = read_transformer("layers=2,width=8,heads=2,vocab=5,bias=no,dropout=0,qkv_bias=yes").shape
    assert not isinstance(one, int)
    told = {key: getattr(one, key) for key in ("has_bias", "has_out_bias", "has_qkv_bias", "has_dropout")}
    assert told == {"has_bias": False, "has_out_bias": False, "has_qkv_bias": True, "has_dropout": False}
    assert not one.has_attention_dropout  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1024", 1024), ("1M", 10**6), ("3.2M", 3_200_000), ("175e9", 175 * 10**9), ("0.5b", 5 * 10**8)],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    """Suffixes are decimal."""
    assert read_count(text, "tokens") == number


@pytest.mark.parametrize("text", ["", "x", "1.5", "0", "-3", "1e99", "9" * 40, "1 M M"])
def test_numbers_that_are_none(text: str) -> None:
    """Not whole, nothing, or beyond reason."""
    with pytest.raises(UsageError, match="number of tokens"):
        read_count(text, "tokens")


def test_a_perceptron_by_hand() -> None:
    """784, 512, 10: 784 x 512 + 512 + 512 x 10 + 10 parameters; of 64 samples the 512 that ReLU returned are kept."""
    shape = read_perceptron("784,512,10")
    assert count(shape.parameters) == 407_050
    assert shape.kept == {"relu": 512}
    groups = estimate(Model("", shape), Setting(tokens=64)).by_group
    assert groups["activations"] == 64 * 512 * 4
    assert groups["ends"] == 64 * 10 * 4


def test_other_activations_keep_what_they_read() -> None:
    """GELU's backward reads its input, so the linear layer's output is kept in addition to GELU's own."""
    assert read_perceptron("784,512,10,gelu").kept == {"linear": 512, "gelu": 512}
    assert read_perceptron("784,512,10,tanh").kept == {"tanh": 512}


def test_convolutions_by_hand() -> None:
    """3x8x8 through 4 channels of 3x3 with padding, a pool of 2, a linear layer: sizes bs x nc x ho x wo."""
    shape = Network.read("3x8x8,4k3p1,bn,relu,maxpool2,dropout,linear10")
    # No bias before the norm; two numbers a channel in the norm; 4 x 4 x 4 values reach the linear layer.
    assert count(shape.parameters) == 4 * 3 * 9 + 2 * 4 + 64 * 10 + 10
    assert shape.kept == {"conv": 4 * 64, "relu": 4 * 64, "dropout": 4 * 16}
    assert (shape.masks, shape.indices, shape.channels, shape.outputs) == (64, 64, 4, 10)
    groups = estimate(Model("", shape), Setting(tokens=2, precision=PRECISIONS["fp16"])).by_group
    assert groups["activations"] == 2 * (2 * 576 + 64 + 8 * 64) + 8 * 4


def test_strides_groups_and_biases() -> None:
    """Sizes by the usual arithmetic: (side + 2 p - k) / s + 1; a bias where no norm follows, or as asked for."""
    shape = Network.read("4x9x9,8k3s2g2,relu,8k1b0")
    assert shape.outputs == 8 * 4 * 4
    assert count(shape.parameters) == 8 * 2 * 9 + 8 + 8 * 8
    assert count(Network.read("4x9x9,8k1b1,bn").parameters) == 4 * 8 + 8 + 16


def test_a_residual_keeps_its_input_once() -> None:
    """Both paths read the same tensor, which is counted once; only ReLU reads the sum, and does not save it."""
    shape = Network.read("4x6x6,relu,[4k3p1,bn|4k1,bn],relu")
    assert shape.kept == {"relu": 2 * 144, "conv": 2 * 144}
    assert Network.read("4x6x6,([4k3p1,bn],relu)x3").kept == {"conv": 3 * 144, "relu": 3 * 144}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "size of a sample"),
        ("3x3,4k3", "channels x height x width"),
        ("3x3x0,4k3", "one size"),
        ("3x3x3", "no layers"),
        ("3x3x3,what", "invalid layer"),
        ("3x3x3,4k0", "size of 0"),
        ("3x3x3,4k9", "leaves nothing"),
        ("3x3x3,4k1g2", "3 channels into 2 groups"),
        ("3x3x3,[4k1|5k1],relu", "4x3x3 and 5x3x3"),
        ("3x3x3,[4k1", "at its end"),
        ("3x3x3,(relu)", "needs a repeat count"),
        ("3x3x3,relu)x2", "a comma is missing"),
        ("784,4k3", "needs channels"),
        ("3x3x3,((relu)x999)x999", "more than 100,000"),
        ("3x3x3," + "[" * 60, "deep"),
    ],
)
def test_networks_that_cannot_be(text: str, says: str) -> None:
    """A sentence names the layer."""
    with pytest.raises(UsageError, match=says):
        Network.read(text)


@settings(max_examples=150)
@given(st.text(alphabet="0123456789xkspgb,[]|()relu bn", max_size=40))
def test_any_text_is_a_network_or_refused(text: str) -> None:
    """Any input results in a network or an error message."""
    try:
        shape = Network.read(text)
    except MemprofError as error:
        assert str(error)  # noqa: PT017 - either is right
    else:
        assert shape.outputs > 0


def test_checkpointing_a_network_is_refused() -> None:
    """Formulas for that exist for transformers only; the message names recording."""
    with pytest.raises(UsageError, match="memprof record"):
        estimate(Model("", read_perceptron("3,4")), Setting(tokens=2, checkpoint="layers"))
