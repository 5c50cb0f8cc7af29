"""The formulas of `memprof estimate`, compared with examples of their sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.analysis.estimate.estimate import MOST_RANKS, Estimate, estimate, on_machine
from memprof.analysis.estimate.model import Model, find_model, known_models, model_of_count, read_transformer
from memprof.analysis.estimate.terms import GROUPS, OPTIMIZERS, PRECISIONS, Setting, Term, sum_terms
from memprof.errors import UsageError
from memprof.machines.catalogue import find_machine
from memprof.units import format_bytes

GIB = 2**30


def made(model: str, batch: int = 1, length: int = 2048, precision: str = "fp16", **more: object) -> Estimate:
    setting = Setting(tokens=batch * length, length=length, precision=PRECISIONS[precision], **more)  # type: ignore[arg-type]
    return estimate(find_model(model), setting)


def term_of(found: Estimate, name: str) -> Term:
    (one,) = [term for term in found.terms if term.name == name]
    return one


def test_the_quiz() -> None:
    """GPT-3 2.7B, fp16, activations at layer boundaries, a million tokens: 1M x 2560 x 2 B x 32 = 152.59 GiB."""
    setting = Setting(tokens=10**6, length=2048, precision=PRECISIONS["fp16"], checkpoint="layers")
    found = estimate(find_model("gpt3-2.7b"), setting)
    assert found.by_group["activations"] == 163_840_000_000
    assert format_bytes(found.by_group["activations"]) == "152.59 GiB"


def test_weights_and_adam_of_175_billion() -> None:
    """175B weights take 350 GB in 16 bits and 700 GB in 32; gradient and both moments of Adam 12 x 175 GB."""
    half = estimate(model_of_count("175B"), Setting(tokens=1, precision=PRECISIONS["fp16"], optimizer="adam"))
    full = estimate(model_of_count("175B"), Setting(tokens=1, optimizer="adam"))
    assert half.by_group["weights"] == 350 * 10**9
    assert full.by_group["weights"] == 700 * 10**9
    adam = full.by_group["gradients"] + full.by_group["optimizer"]
    assert adam == 12 * 175 * 10**9 + 4  # and how often the one tensor was updated


@pytest.mark.parametrize(("precision", "gigabytes"), [("fp16", 78.64), ("fp32", 157.29)])
def test_a_boundary_of_175_billion(precision: str, gigabytes: float) -> None:
    """3.2M tokens x 12288 = 39.32e9 values at one boundary; 96 boundaries are 96 times that."""
    setting = Setting(tokens=3_200_000, length=2048, precision=PRECISIONS[precision], checkpoint="layers")
    found = estimate(find_model("gpt3-175b"), setting)
    values = 3_200_000 * 12_288
    assert values == 39_321_600_000
    kept = found.by_group["activations"]
    assert kept == 96 * values * PRECISIONS[precision].stream
    assert kept / 96 / 1e9 == pytest.approx(gigabytes, abs=0.005)


#: sbh of one layer of 175B at batch 1 and 2048 tokens; 5 as/h = 5 x 96 x 2048 / 12288 = 80.
SBH = 2048 * 12_288


@pytest.mark.parametrize(
    ("ranks", "is_sequence", "checkpoint", "factor", "formula"),
    [
        (1, False, "none", 34 + 80, "L sbh (34 + 5 as/h)"),
        (8, False, "none", 10 + 24 / 8 + 80 / 8, "L sbh (10 + 24/t + 5 as/(ht))"),
        (8, True, "none", (34 + 80) / 8, "L sbh/t (34 + 5 as/h)"),
        (8, False, "selective", 10 + 24 / 8, "L sbh (10 + 24/t)"),
        (8, True, "selective", 34 / 8, "34 L sbh/t"),
        (1, False, "selective", 34, "34 L sbh"),
    ],
)
def test_megatrons_forms(ranks: int, is_sequence: bool, checkpoint: str, factor: float, formula: str) -> None:
    """Table 2 of Korthikanti et al. 2022: every form of a layer's activations, in bytes and as it is written."""
    found = made(
        "gpt3-175b",
        precision="bf16-mixed",
        has_flash=False,
        tensor_ranks=ranks,
        is_sequence_parallel=is_sequence,
        checkpoint=checkpoint,
    )
    one = term_of(found, "saved by the layers")
    assert one.bytes == 96 * factor * SBH
    assert one.formula == formula


def test_full_recomputation_keeps_two_bytes_a_value() -> None:
    """Table 2's last row: 2 sbh a layer, and Chen's one layer that is made again, its input counted once."""
    found = made("gpt3-175b", precision="bf16-mixed", has_flash=False, checkpoint="layers")
    assert term_of(found, "inputs of the layers").bytes == 96 * 2 * SBH
    statistics = 16 * 2048
    assert term_of(found, "one layer, recomputed").bytes == (34 + 80) * SBH + statistics - 2 * SBH


def test_every_fourth_layer_keeps_a_fourth_and_runs_four() -> None:
    """O(n/k) + O(k): with 96 layers, 24 inputs are kept and 4 layers made again."""
    found = made("gpt3-175b", has_flash=False, checkpoint="layers", every=4)
    assert term_of(found, "inputs of every 4 layers").bytes == 24 * 2 * SBH
    assert term_of(found, "4 layers, recomputed").bytes == 4 * ((34 + 80) * SBH + 16 * 2048) - 2 * SBH


def test_flash_attention_leaves_a_number_for_each_row_of_scores() -> None:
    """Without scores 34 sbh are left, and 4 bytes for each head and token."""
    found = made("gpt3-175b")
    assert term_of(found, "saved by the layers").bytes == 96 * 34 * SBH
    assert term_of(found, "statistics").bytes == 96 * 2048 * (4 * 96 + 16)


def test_ends_are_those_of_the_source() -> None:
    """Korthikanti, section 4.3: sbh of dropout, and 4 sbh (1 + v/h) of norm, head and fp32 logits, statistics aside."""
    found = made("gpt3-175b", precision="bf16-mixed")
    tokens, width, vocabulary = 2048, 12_288, 50_257
    published = tokens * width + 4 * tokens * (width + vocabulary)
    assert found.by_group["ends"] == published + 8 * tokens


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_zero_stages(zero: int, gigabytes: float) -> None:
    """ZeRO's own figure 1: 7.5B parameters over 64 ranks, mixed precision and Adam: 120, 31.4, 16.6 and 1.9 GB."""
    setting = Setting(tokens=1, precision=PRECISIONS["fp16-mixed"], optimizer="adam", zero=zero, ranks=64)
    assert estimate(model_of_count("7.5B"), setting).total_bytes == pytest.approx(gigabytes * 1e9, abs=8)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        ("sgd", 0),
        ("momentum", 4 * 163_840),
        ("adam", 8 * 163_840 + 4 * 2),
        # Of the matrix 8-bit codes, a scale for each 256 and a table, twice; the vector of 0 is below 4096 numbers.
        ("adam8bit", 2 * (163_840 + 4 * 640 + 1024) + 8),
        ("adafactor", 4 * (256 + 640) + 8),
    ],
)
def test_optimizer_state(optimizer: str, size: int) -> None:
    """State of one matrix of 256 x 640, and of a second tensor that is too small to count: worked out by hand."""
    from memprof.analysis.estimate.states import Parameter, state_terms

    small = Parameter("nothing", (0,))
    terms = state_terms([Parameter("matrix", (256, 640)), small], Setting(tokens=1, optimizer=optimizer))
    assert sum(term.bytes for term in terms if term.group == "optimizer") == size


def test_mixed_precision_keeps_a_master_copy_and_autocast_casts() -> None:
    """Micikevicius: 2 + 2 + 4 + 8 bytes a parameter. Autocast: 4 + 4 + 8, and 2 for each weight of a product."""
    shape = read_transformer("layers=2,width=64,heads=4,vocab=96,tied=no")
    parameters = sum(one.elements for one in shape.parameters)
    products = sum(one.elements for one in shape.parameters if one.is_product)
    assert products == 2 * 12 * 64 * 64 + 96 * 64
    tensors = 4 * sum(one.times for one in shape.parameters)
    mixed = estimate(shape, Setting(tokens=32, length=32, precision=PRECISIONS["bf16-mixed"])).by_group
    assert mixed["weights"] + mixed["gradients"] + mixed["optimizer"] == 16 * parameters + tensors
    cast = estimate(shape, Setting(tokens=32, length=32, precision=PRECISIONS["bf16-autocast"]))
    groups = cast.by_group
    assert groups["weights"] + groups["gradients"] + groups["optimizer"] == 16 * parameters + tensors
    assert sum(term.bytes for term in cast.terms if term.name == "weights cast") == 2 * products


def test_gated_layers_and_grouped_queries() -> None:
    """LLaMA 3 8B in 16 bits: inputs and norms 4 x 2 h, queries and their product's input 4 q, keys and values 4 k,
    gate, activation, product and output 8 f."""
    found = made("llama3-8b", length=4096, precision="bf16")
    a_token = 8 * 4096 + 4 * 4096 + 4 * 1024 + 8 * 14_336
    assert term_of(found, "saved by the layers").bytes == 32 * 4096 * a_token
    assert term_of(found, "saved by the layers").formula == "L sb (8 h + 4 q + 4 k + 8 f)"


def test_micro_batches_divide_what_is_kept() -> None:
    """Activation memory is linear in the batch: 8 micro-batches keep an eighth, weights stay."""
    whole, parts = made("gpt2", batch=8, length=1024), made("gpt2", batch=8, length=1024, micro_batches=8)
    assert 8 * parts.by_group["activations"] == whole.by_group["activations"]
    assert parts.by_group["weights"] == whole.by_group["weights"]


def test_of_temporaries_the_fullest_moment_counts() -> None:
    """What is there at other moments is not added: 5 + max(3 + 1, 2)."""
    terms = [
        Term("temporaries", "always", 5, "", ""),
        Term("temporaries", "a", 3, "", "", moment="loss"),
        Term("temporaries", "b", 1, "", "", moment="loss"),
        Term("temporaries", "c", 2, "", "", moment="backward"),
    ]
    assert sum_terms(terms) == 9


def test_moments_hold_what_is_there_at_once() -> None:
    """At the loss no gradients, at the update no activations, and gradients at both where micro-batches add up."""
    found = made("gpt2", batch=8, length=1024)
    groups = found.by_group
    states = groups["weights"] + groups["optimizer"]
    assert found.moments == {
        "loss": states + groups["activations"] + groups["ends"] + groups["temporaries"],
        "update": states + groups["gradients"],
    }
    assert found.fullest_bytes == found.total_bytes - groups["gradients"]
    parts = made("gpt2", batch=8, length=1024, micro_batches=2)
    assert parts.moments["loss"] == parts.total_bytes
    again = made("gpt2", batch=8, length=1024, checkpoint="layers")
    layer, loss = (term_of(again, name).bytes for name in ("one layer, recomputed", "logits and gradients of the loss"))
    assert again.moments["backward"] - again.moments["loss"] == layer - loss + again.by_group["gradients"]


def test_every_term_has_a_formula_and_a_source() -> None:
    """Every figure of every model has a source."""
    for name in known_models():
        for precision in PRECISIONS:
            for term in made(name, length=512, precision=precision, zero=3, ranks=4).terms:
                assert term.formula, term
                assert term.source, term
                assert term.group in GROUPS


def test_letters_explain_every_formula() -> None:
    """Every letter used in a formula is listed with its value."""
    import re

    for name in ("gpt3-175b", "llama3-8b", "bert-base"):
        for more in ({"zero": 3, "ranks": 4}, {"tensor_ranks": 2}, {"checkpoint": "layers"}):
            for precision in ("fp32", "bf16-autocast"):
                found = made(name, length=512, precision=precision, **more)
                letters = set(found.letters) | {"s", "b", "sbh", "sbv", "as", "ht", "tensors"}
                for term in found.terms:
                    used = set(re.findall(r"[A-Za-z]+", term.formula))
                    assert used <= letters, (term.formula, used - letters)


@settings(max_examples=60)
@given(
    name=st.sampled_from(known_models()),
    precision=st.sampled_from(list(PRECISIONS)),
    optimizer=st.sampled_from(OPTIMIZERS),
    zero=st.integers(0, 3),
    ranks=st.integers(2, 512),
    tensor=st.integers(1, 8),
    is_sequence=st.booleans(),
    has_flash=st.booleans(),
    batch=st.integers(1, 16),
)
def test_more_ranks_never_take_more(
    name: str,
    precision: str,
    optimizer: str,
    zero: int,
    ranks: int,
    tensor: int,
    is_sequence: bool,
    has_flash: bool,
    batch: int,
) -> None:
    """Groups sum to the total; twice the ranks never take more, nor does a higher stage that gathers nothing."""
    setting = Setting(
        tokens=batch * 512,
        length=512,
        precision=PRECISIONS[precision],
        optimizer=optimizer,
        zero=zero,
        ranks=ranks,
        tensor_ranks=tensor,
        is_sequence_parallel=is_sequence and tensor > 1,
        has_flash=has_flash,
    )
    model = find_model(name)
    found = estimate(model, setting)
    assert sum(found.by_group.values()) == found.total_bytes >= found.fullest_bytes
    assert all(term.bytes > 0 for term in found.terms)
    assert estimate(model, replace(setting, ranks=2 * ranks)).total_bytes <= found.total_bytes
    if zero < 2:
        assert estimate(model, replace(setting, zero=zero + 1)).total_bytes <= found.total_bytes
    more = estimate(model, replace(setting, tokens=2 * setting.tokens))
    assert more.total_bytes > found.total_bytes


def test_least_ranks_are_the_least() -> None:
    """So many ranks fit, one fewer do not."""
    found = made("llama3-8b", length=1024, precision="bf16-mixed", checkpoint="layers")
    on = on_machine(found, find_machine("rtx3090"))
    assert not on.fits
    assert on.least_ranks is not None
    assert on.least_ranks > 2

    def bytes_over(ranks: int) -> int:
        return estimate(found.model, replace(found.setting, zero=3, ranks=ranks)).total_bytes

    budget = find_machine("rtx3090").budget_bytes
    assert bytes_over(on.least_ranks) <= budget < bytes_over(on.least_ranks - 1)


def test_what_no_ranks_can_hold() -> None:
    """Activations alone are above the card, and no stage divides them: none are enough. Where it is the stage, 3 is."""
    card = find_machine("rtx3090")
    assert on_machine(made("gpt3-175b", batch=4), card).least_ranks is None
    staged = on_machine(made("llama3-8b", length=128, precision="bf16-mixed", zero=1, ranks=8), card)
    assert (staged.zero, staged.fits) == (3, False)
    assert staged.least_ranks is not None
    assert staged.least_ranks <= MOST_RANKS
    small = on_machine(made("gpt2", length=128), card)
    assert (small.fits, small.least_ranks) == (True, 1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"zero": 2}, "--ranks"),
        ({"is_sequence_parallel": True}, "--tensor-parallel"),
        ({"micro_batches": 3}, "micro-batches"),
        ({"checkpoint": "selective"}, "--no-flash"),
    ],
)
def test_settings_that_contradict_themselves(more: dict[str, object], says: str) -> None:
    """A sentence names what is missing."""
    with pytest.raises(UsageError, match=says):
        made("gpt2", **more)


def test_a_number_of_parameters_has_no_activations() -> None:
    """Nothing is made up where no shape is known."""
    model: Model = model_of_count("7B")
    assert {term.group for term in estimate(model, Setting(tokens=64)).terms} == {"weights", "gradients", "optimizer"}
    with pytest.raises(UsageError, match="shape"):
        estimate(model, Setting(tokens=64, checkpoint="layers"))
