"""A plan as a TOML file: writing, reading, its budget, and error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import BadInputError, PolicyError
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, parse_plan, read_plan, write_plan
from memprof.policies.plan.plan_tables import plan_from_tables, plan_to_tables, policy_tables
from memprof.policies.plan.prediction import Prediction
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import policy_types
from memprof.policies.swap.policy import Swap

PREDICTION = Prediction(
    trace="runs/run.memprof",
    model="GPT",
    parameter_bytes=2_220_288,
    recorded_peak_bytes=33_418_972,
    recorded_step_time_us=51088.8525390625,
    peak_allocated_bytes=18_506_716,
    peak_phase="backward",
    peak_module="layers.3",
    step_time_us=35985.21026147271,
    how="modelled",
    phases={"forward": 17_720_288, "backward": 18_506_716, "my rollout v1.2": 3},
    categories={"activation": 7_941_892, "workspace": 0},
)


PLAN = Plan((Checkpoint(modules=("layers.*",)), Precision(dtype="bf16")), PREDICTION)


def test_plan_reads_as_a_person_would_write_it() -> None:
    """One table a policy, settings that differ from the defaults, and a comment that says what it does."""
    assert format_plan(Plan((Precision(dtype="fp16"),))) == (
        '[precision]\n# precision fp16\n# numerics differ by rounding\ndtype = "fp16"\n'
    )


def test_several_of_a_kind_are_an_array() -> None:
    """Two policies of a kind stand under two headers, in their order."""
    plan = Plan((Swap(modules=("b",)), Swap(modules=("a",), to="disk")))
    assert format_plan(plan).count("[[swap]]") == 2
    assert parse_plan(format_plan(plan)) == plan


def test_round_trip_is_exact() -> None:
    """Policies and prediction come back equal, every float to its last bit, from TOML and from the tables in JSON."""
    assert parse_plan(format_plan(PLAN)) == PLAN
    assert plan_from_tables(json.loads(json.dumps(plan_to_tables(PLAN)))) == PLAN


@pytest.mark.parametrize("kind", policy_types(), ids=lambda kind: kind.name)
def test_every_policy_survives_with_its_example(kind: type) -> None:
    """What each policy's flag makes of its own example is written and read back."""
    plan = Plan((kind.from_flag(kind.flag_example.strip("'")),))
    assert parse_plan(format_plan(plan)) == plan


@given(
    patterns=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1),
    minimum=st.integers(0, 2**62),
    time_us=st.floats(allow_nan=False),
)
def test_any_text_and_number_comes_back(patterns: list[str], minimum: int, time_us: float) -> None:
    """Quotes, newlines, escapes and other scripts in patterns, and any number, survive the file."""
    prediction = Prediction(**{**vars(PREDICTION), "step_time_us": time_us, "trace": patterns[0]})
    plan = Plan((Swap(modules=tuple(patterns), minimum_bytes=minimum), Swap()), prediction)
    assert parse_plan(format_plan(plan)) == plan


def test_what_somebody_wrote_is_kept() -> None:
    """Writing a prediction into a plan leaves its lines and comments alone, and replaces an older prediction."""
    mine = "# my plan\n[checkpoint]   # the big ones\nmodules = 'layers.*'\n\n[precision]\ndtype = 'bf16'\n"
    once = format_plan(PLAN, before=mine)
    assert once.startswith(mine)
    assert parse_plan(once) == PLAN
    assert format_plan(PLAN, before=once) == once


def test_other_policies_are_written_anew() -> None:
    """A text that holds other policies is not kept."""
    assert "my plan" not in format_plan(PLAN, before="# my plan\n[accumulate]\nmicro_batches = 2\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[chekpoint]\nmodules = ['a']", "line 1: a plan has no policy 'chekpoint'; did you mean checkpoint?"),
        ("\n[checkpoint]\n\nmodule = ['a']", "line 4: [checkpoint] has no setting 'module'; did you mean modules?"),
        ("[swap]\nmodules = 3", "plan.toml, line 2: modules in [swap] must be a list of strings, not 3."),
        ("[swap]\nmodules = ['a', 3]", "must be a list of strings"),
        ("[accumulate]\nmicro_batches = true", "line 2: micro_batches in [accumulate] must be a whole number, not"),
        ("[accumulate]\nmicro_batches = 2.5", "must be a whole number, not 2.5."),
        ("[accumulate]\nmicro_batches = 0", "plan.toml, line 1: "),
        ("[[swap]]\nto = 'host'\n[[swap]]\nto = 'tape'", "plan.toml, line 3: "),
        ("memory = 4", "plan.toml, line 1: a plan has no key 'memory' outside of its tables"),
        ("checkpoint = 1", "checkpoint must be a table: write [checkpoint]"),
        ("[prediction]\ntrace = 'x'", "plan.toml, line 1: [prediction] lacks model, parameter_bytes"),
        ("[prediction.phases]\nforward = 'x'", "must be a table of whole numbers"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    """Invalid content gets one message with the file, the line and the nearest known word."""
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as error:
        read_plan(path)
    assert sentence in str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        (b"[checkpoint", "is not valid TOML: "),
        (b"a = 1\na = 2", "is not valid TOML: "),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"x = " + b"[" * 5000, "plan.toml is nested too deep."),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """A missing file and one that is not TOML are bad input."""
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError) as error:
        read_plan(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A folder that is missing leaves nothing and is named; a file that is there is replaced in one go."""
    with pytest.raises(BadInputError, match=r"absent/plan\.toml cannot be written"):
        write_plan(tmp_path / "absent" / "plan.toml", PLAN)
    write_plan(tmp_path / "plan.toml", Plan((Accumulate(4),)))
    write_plan(tmp_path / "plan.toml", PLAN)
    assert read_plan(tmp_path / "plan.toml") == PLAN
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.toml"]


def test_reading_needs_neither_torch_nor_tomlkit() -> None:
    """A plan is read with Python's own parser: in the job, and on a machine that only looks at traces."""
    code = (
        "import sys; from memprof.policies.plan.plan_file import parse_plan; "
        "parse_plan('[precision]\\ndtype=\"bf16\"'); "
        "print('torch' in sys.modules, 'tomlkit' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\n"


CHECKPOINT = Checkpoint(modules=("layers.*",))


BUDGET_PLAN = Plan((CHECKPOINT,), budget_bytes=30 << 30)


def test_it_stands_first_in_bytes_and_in_words() -> None:
    """A person reads the unit, a program the bytes; it comes back to the byte from TOML and from the tables in JSON."""
    assert format_plan(BUDGET_PLAN).splitlines()[0] == "budget = 32212254720  # 30.00 GiB"
    assert parse_plan(format_plan(BUDGET_PLAN)) == BUDGET_PLAN
    assert plan_from_tables(plan_to_tables(BUDGET_PLAN)) == BUDGET_PLAN
    assert policy_tables(plan_to_tables(BUDGET_PLAN)) == {"checkpoint": {"modules": ["layers.*"]}}


def test_a_size_may_be_written_with_its_unit() -> None:
    """As for --budget."""
    assert parse_plan('budget = "24GiB"').budget_bytes == 24 << 30
    assert parse_plan("budget = 4096").budget_bytes == 4096


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# mine\n[checkpoint]  # all\n", "budget = 32212254720  # 30.00 GiB\n\n# mine\n[checkpoint]  # all\n"),
        (
            "# mine\nbudget = '24GiB'\n[checkpoint]  # all\n",
            "# mine\nbudget = 32212254720  # 30.00 GiB\n[checkpoint]  # all\n",
        ),
        ("# mine\nbudget = '30GiB'  # ours\n[checkpoint]\n", "# mine\nbudget = '30GiB'  # ours\n[checkpoint]\n"),
    ],
)
def test_it_is_written_into_a_file_of_ones_own(before: str, after: str) -> None:
    """Added above everything, replaced in its place, and left in one's own words where it is the same."""
    settings = "modules = 'layers.*'\n"
    assert format_plan(BUDGET_PLAN, before + settings) == after + settings
    without = format_plan(Plan((CHECKPOINT,)), after + settings)
    assert "budget" not in without
    assert without.endswith(settings)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("budget = '60%'", 'plan.toml, line 1: budget must be a size such as "24GiB", or a number of bytes: '),
        ("\nbudget = 1.5", "plan.toml, line 2: budget must be a size"),
        ("budget = true", "not true."),
        ("budget = 0", "not 0."),
        ("budget = -4096", "not -4096."),
        ("[budget]\nbytes = 4", "not {'bytes': 4}."),
        ("[checkpoint]\nbudget = 4096", "line 2: budget is not a setting of [checkpoint]; write it above the first"),
        ("budgt = 4096", "did you mean budget?"),
    ],
)  # fmt: skip
def test_mistakes_about_budgets_are_named(text: str, sentence: str) -> None:
    """One sentence with the line and what may stand there."""
    with pytest.raises(PolicyError) as error:
        parse_plan(text, "plan.toml")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_the_size_it_is_for_is_kept_as_well() -> None:
    """The budget is above the tables; it is replaced and removed in a user's file, whose comments stay."""
    plan = Plan((CHECKPOINT,), budget_bytes=30 << 30, at_length=512)
    assert format_plan(plan).splitlines()[1] == "at_length = 512"
    assert parse_plan(format_plan(plan)) == plan
    assert plan_from_tables(plan_to_tables(plan)) == plan
    assert policy_tables(plan_to_tables(plan)) == {"checkpoint": {"modules": ["layers.*"]}}
    assert plan.with_policies([Precision("bf16")]).at_length == 512
    assert (plan.at, Plan(at_batch=8).at, BUDGET_PLAN.at) == ("length 512", "batch 8", "")
    mine = "# mine\n[checkpoint]  # all\nmodules = 'layers.*'\n"
    longer = format_plan(Plan((CHECKPOINT,), at_length=1024), format_plan(Plan((CHECKPOINT,), at_length=512), mine))
    assert longer == f"at_length = 1024\n\n{mine}"
    assert "at_length" not in format_plan(Plan((CHECKPOINT,)), longer)
    assert format_plan(Plan((CHECKPOINT,)), longer).endswith(mine)


@pytest.mark.parametrize("value", ["0", "-4", "'long'", "1.5", "true"])
def test_no_size_is_refused(value: str) -> None:
    """An invalid size is reported with its line."""
    with pytest.raises(PolicyError, match="line 1: at_batch must be a whole number above 0"):
        parse_plan(f"at_batch = {value}")


def test_a_size_below_a_table_says_where_it_belongs() -> None:
    """Below a policy it would be its setting."""
    with pytest.raises(PolicyError, match=r"at_length is not a setting of .*; write it above the first table"):
        parse_plan("[checkpoint]\nmodules = 'layers.*'\nat_length = 512")
