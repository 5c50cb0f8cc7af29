"""Gates: parsing, verdicts and messages."""

from __future__ import annotations

import math

import pytest

from memprof.analysis.diff.gates import parse_gate, require_phases
from memprof.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "base", "head", "is_failed"),
    [
        ("peak>+2%", 100, 102, False),  # a limit may be reached
        ("peak>+2%", 100, 103, True),
        ("peak>+256MiB", 0, 256 * MIB, False),
        ("peak>+256MiB", 0, 256 * MIB + 1, True),
        ("peak>1GiB", 0, 2**30, False),
        ("peak>1GiB", math.nan, 2**30 + 1, True),  # a value of its own needs nothing to compare with
        ("peak > +2% & +128MiB", 1000 * MIB, 1100 * MIB, False),  # 10 %, but only 100 MiB
        ("peak > +2% & +128MiB", 1000 * MIB, 1200 * MIB, True),
        ("peak > +2% & +128MiB", 100_000 * MIB, 100_200 * MIB, False),  # 200 MiB, but only 0.2 %
        ("activation>+0%", 0, 1, True),  # a share of nothing
        ("step_time>+5ms", 1000.0, 6001.0, True),
        ("step_time>+10%", 1000.0, 1100.0, False),
        ("module:layers.*>+100MiB", 0, 99 * MIB, False),
        ("phase:backward>+3%", 100, 90, False),
    ],
)
def test_gate_fails_beyond_all_of_its_limits(text: str, base: float, head: float, is_failed: bool) -> None:
    """Growth as a share or in bytes, values of their own, both together."""
    verdict = parse_gate(text).judge(base, head)
    assert verdict.is_known
    assert verdict.is_failed is is_failed


def test_what_is_unknown_is_not_judged() -> None:
    """Unknown gates neither pass nor fail, and are reported as unknown."""
    verdict = parse_gate("reserved-allocated>+1GiB").judge(math.nan, 5.0)
    assert not verdict.is_known
    assert not verdict.is_failed
    assert verdict.describe() == "reserved-allocated is unknown on at least one side"


@pytest.mark.parametrize(
    ("text", "base", "head", "is_failed", "is_undecided"),
    [
        ("peak>4GiB", math.nan, 3 * 2**30, False, True),
        ("peak>2GiB", math.nan, 3 * 2**30, True, False),
        ("peak>+1GiB", 2**30, 4 * 2**30, False, True),
        ("step_time>+5ms", 1000.0, 1001.0, False, False),
    ],
)
def test_a_lower_bound_fails_a_gate_or_leaves_it_undecided(
    text: str, base: float, head: float, *, is_failed: bool, is_undecided: bool
) -> None:
    """3 GiB or more exceed 2 GiB, and may exceed 4; growth over a base of 1 GiB or more is unknown."""
    verdict = parse_gate(text).judge(base, head, least_base="begun late", least_head="begun late")
    assert (verdict.is_failed, verdict.is_undecided) == (is_failed, is_undecided)
    assert is_undecided == verdict.describe().endswith("GiB: begun late")


def test_verdict_says_before_after_and_change() -> None:
    """Nothing is divided by a base of zero."""
    assert parse_gate("peak>+2%").judge(100 * MIB, 125 * MIB).describe() == (
        "peak 100.00 MiB -> 125.00 MiB (+25.00 MiB, +25.0 %)"
    )
    assert parse_gate("category:unknown>+2%").judge(0, MIB).describe() == (
        "category:unknown 0 B -> 1.00 MiB (+1.00 MiB)"
    )
    assert parse_gate("peak>1KiB").judge(math.nan, 2048).describe() == "peak 2.00 KiB"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("peak", "'peak[here]'"),
        ("speed>+2%", "'[here]speed>+2%': unknown measure 'speed'"),
        ("layer:x>+2%", "unknown kind 'layer'"),
        ("phase:side/ways>+2%", "'phase:[here]side/ways>+2%': invalid phase 'side/ways'"),
        ("module:>+2%", "invalid module ''"),
        ("peak>much", "'peak>[here]much'"),
        ("peak>+2%&", "'peak>+2%&[here]'"),
        ("peak>2%", "a share needs a base: write +2%"),
        ("peak>+2parsec", "invalid size '+2parsec'"),
        ("step_time>+2MiB", "invalid time '+2MiB'"),
        ("peak>-5%", "invalid limit '-5%'"),
    ],
)
def test_mistakes_are_pointed_at(text: str, sentence: str) -> None:
    """The sentence shows the place, and what can stand there."""
    with pytest.raises(UsageError) as caught:
        parse_gate(text)
    assert sentence in str(caught.value)


def test_phases_that_a_job_names() -> None:
    """A misspelled one would never fail, so a recording has to have it; of the recorder, any may be missing."""
    gates = [parse_gate(f"phase:{name}>1GiB") for name in ("rollout v2", "evaluation", "backward")]
    assert [gate.name for gate in gates] == ["rollout v2", "evaluation", "backward"]
    require_phases(gates, ["forward", "rollout v2"])
    with pytest.raises(UsageError, match="no recording has a phase 'rollout v2'; choose from forward, rolout"):
        require_phases(gates, ["rolout", "forward"])
