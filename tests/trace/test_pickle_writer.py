"""Pickles written from columns: read again, they are the values."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.trace.exporters.pickle_writer import Cells, PickleWriter

_INT64 = st.integers(-(2**63), 2**63 - 1)
_PLAIN = st.recursive(
    st.one_of(_INT64, st.booleans(), st.text(max_size=300)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(_PLAIN)
def test_a_value_is_read_again(value: object) -> None:
    """Numbers of all widths, texts of all lengths, lists, dictionaries and pairs."""
    file = io.BytesIO()
    writer = PickleWriter(file)
    writer.item("a", [])
    writer.item("a", value)
    writer.end()
    assert pickle.loads(file.getvalue()) == {"a": value}


@given(st.lists(_INT64, min_size=1, max_size=20), st.integers(1, 400))
def test_rows_are_read_again(values: list[int], count: int) -> None:
    """Columns of numbers of any range, and of values written before, however many of those there are."""
    file = io.BytesIO()
    writer = PickleWriter(file)
    words = [*(f"w{place}" for place in range(count)), [1, "w0"]]
    shared = writer.share("rows", ["number", "word", *words])
    some = np.arange(len(values)) % len(words)
    keys = [Cells(np.full(len(values), shared[place]), is_shared=True) for place in (0, 1)]
    columns = [(keys[0], Cells(np.array(values))), (keys[1], Cells(shared[2 + some], is_shared=True))]
    writer.lists_of_rows("rows", [[columns, columns], []])
    writer.end()
    rows = [{"number": value, "word": words[place]} for value, place in zip(values, some.tolist(), strict=True)]
    assert pickle.loads(file.getvalue()) == {"rows": [rows * 2, []]}


def test_long_lists_are_written_in_batches() -> None:
    """More rows than one batch, under a key that is no valid Unicode."""
    file = io.BytesIO()
    writer = PickleWriter(file)
    (key,) = writer.share("rows", ["\udcff"])
    writer.lists_of_rows("rows", [[[(Cells(np.full(2500, key), is_shared=True), Cells(np.arange(2500) << 40))]]])
    writer.end()
    assert pickle.loads(file.getvalue()) == {"rows": [[{"\udcff": place << 40} for place in range(2500)]]}
    assert file.getvalue().count(b"ue") == 3


def test_values_of_other_types_are_refused() -> None:
    """A snapshot contains none."""
    with pytest.raises(TypeError, match="cannot write float"):
        PickleWriter(io.BytesIO()).item("a", 1.5)
