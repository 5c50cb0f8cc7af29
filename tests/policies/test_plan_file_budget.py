"""The budget in a plan file: format, valid values, and use."""

from __future__ import annotations

import pytest

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, parse_plan
from memprof.policies.plan.plan_tables import plan_from_tables, plan_to_tables, policy_tables
from memprof.policies.precision.policy import Precision

CHECKPOINT = Checkpoint(modules=("layers.*",))
PLAN = Plan((CHECKPOINT,), budget_bytes=30 << 30)


def test_it_stands_first_in_bytes_and_in_words() -> None:
    """A person reads the unit, a program the bytes; it comes back to the byte from TOML and from the tables in JSON."""
    assert format_plan(PLAN).splitlines()[0] == "budget = 32212254720  # 30.00 GiB"
    assert parse_plan(format_plan(PLAN)) == PLAN
    assert plan_from_tables(plan_to_tables(PLAN)) == PLAN
    assert policy_tables(plan_to_tables(PLAN)) == {"checkpoint": {"modules": ["layers.*"]}}


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
    assert format_plan(PLAN, before + settings) == after + settings
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
def test_mistakes_are_named(text: str, sentence: str) -> None:
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
    assert (plan.at, Plan(at_batch=8).at, PLAN.at) == ("length 512", "batch 8", "")
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
