"""The page that describes the format."""

from __future__ import annotations

from pathlib import Path

from memprof.trace.schema import reference

PAGE = Path(__file__).parents[2] / "docs" / "trace-format.md"


def test_format_reference_is_up_to_date() -> None:
    """docs/trace-format.md is what `python -m memprof.trace.schema` prints."""
    assert PAGE.read_text(encoding="utf-8") == reference()
