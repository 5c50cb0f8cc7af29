"""How the columns of a table are stored: coded texts, suffixes in names, lossless codings of integers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from memprof.trace.files.reading import parse_json
from memprof.trace.kept import kept
from memprof.trace.schema import Bools, Ints, Memory, Ops, Table, Texts

#: Key of the codings in the metadata of a Parquet file.
KEY = "memprof"
#: Times are stored as integers of 2**-10 us: finer than any clock, and exact for Unix time, which float64 resolves to a
#: quarter of a microsecond.
TICKS_PER_US = 1024.0
#: What follows a colon in the name of a stored column, in this order: times as ticks; then what is coded by
#: ``series.differences``, or by ``series.distances``, whose new values are in a column of their own. Both apply to the
#: values that are not null.
TICKS, DIFFERENCES, DISTANCES, NEW = "t", "d", "r", "n"
#: All suffixes of a column, except that of its new values.
CODINGS = frozenset(ticks + series for ticks in ("", TICKS) for series in ("", DIFFERENCES, DISTANCES))
#: Columns that usually equal one of another table, row by row: memory is sampled when an operator starts.
ELSEWHERE: Mapping[tuple[type[Table], str], tuple[type[Table], str]] = {
    (Memory, "op_id"): (Ops, "op_id"),
    (Memory, "time_us"): (Ops, "start_us"),
}
#: Rows decoded at once: their values and pointers fit a processor's cache.
_BLOCK = 1 << 15


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of texts without an object for each row.

    Attributes:
        codes: Index of each row's text in ``distinct``.
        distinct: The distinct texts, including "" for missing ones.
    """

    codes: npt.NDArray[np.integer[Any]]
    distinct: Texts

    @staticmethod
    def of(texts: Texts) -> Coded:
        """Dictionary-encodes texts."""
        known: dict[str, int] = {}
        codes = np.fromiter((known.setdefault(text, len(known)) for text in texts.tolist()), np.int32, len(texts))
        distinct: Texts = np.empty(len(known), dtype=object)
        distinct[:] = list(known)
        return Coded(codes, distinct)

    def narrow(self) -> Coded:
        """Returns the column with codes of the fewest bytes, which are unsigned."""
        return Coded(self.codes.astype(np.min_scalar_type(len(self.distinct))), self.distinct)

    def is_any(self, *texts: str) -> Bools:
        """Returns which rows hold one of some texts."""
        wanted = np.isin(self.distinct, texts)
        return wanted[self.codes] if wanted.any() else np.zeros(len(self), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Any:
        return self.distinct[self.codes[rows]]


@kept
def coded_column(table: Table, name: str) -> Coded:
    """Returns a column of texts of a table, encoded once."""
    known = table.part.read(name) if table.part and table.part.is_whole else None
    return known if isinstance(known, Coded) else Coded.of(getattr(table, name))


@dataclass(frozen=True)
class Codings:
    """How the columns of a table are restored.

    Attributes:
        stored: Suffix of each stored column by its name without it; empty for plain values.
        same: Columns that are not stored, as they equal another one: of this table, or that of ``ELSEWHERE``.
        constant: Columns that are not stored, as every row has this value.
    """

    stored: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Returns the stored column with a column's values, without its suffix."""
        return self.same.get(name, name)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Returns the names in the file of what a column is restored from."""
        source = self.source(name)
        if source not in self.stored:
            return ()
        suffix = self.stored[source]
        return (stored_name(source, suffix), *((stored_name(source, NEW),) if DISTANCES in suffix else ()))

    @staticmethod
    def of(names: Iterable[str], metadata: Mapping[bytes, bytes] | None) -> Codings:
        """Reads the codings of a Parquet file: none in those of schema 1, and in exported tables.

        Raises:
            ValueError: They are damaged.
        """
        stored = {name.partition(":")[0]: name.partition(":")[2] for name in names if not name.endswith(f":{NEW}")}
        text = (metadata or {}).get(KEY.encode())
        if text is None:
            return Codings(stored)
        read = parse_json(text)
        if not isinstance(read, dict):
            raise ValueError("its codings are not an object")
        same, constant = read.get("same", {}), read.get("constant", {})
        if not isinstance(same, dict) or not isinstance(constant, dict):
            raise ValueError("its codings are invalid")
        if not all(isinstance(source, str) for source in same.values()):
            raise ValueError("a column of its codings has no name")
        return Codings(stored, same, constant)


def metadata_of(same: Mapping[str, str], constant: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a Parquet file with these codings; see ``Codings``."""
    used = {name: value for name, value in (("same", same), ("constant", constant)) if value}
    return {KEY: json.dumps(used, separators=(",", ":"))} if used else {}


def stored_name(name: str, suffix: str) -> str:
    """Returns the name of a stored column."""
    return f"{name}:{suffix}" if suffix else name


def differences(values: Ints) -> Ints:
    """Returns the first value and the differences that follow; they wrap around, so any values can be coded.

    Their running sum restores the values.
    """
    return np.diff(values, prepend=np.zeros(1, dtype=np.int64))


def distances(values: Ints) -> tuple[Ints, Ints]:
    """Codes each value as the number of rows since the last equal one.

    Addresses are reused in the same order in every step, so their distances repeat, which the addresses do not.

    Returns:
        The distances, 0 where a value appears for the first time, shape (n,); and those values, in order.
    """
    order = np.argsort(values, kind="stable")
    arranged = values[order]
    last = np.full(len(values), -1, dtype=np.int64)
    is_repeated = arranged[1:] == arranged[:-1]
    last[order[1:][is_repeated]] = order[:-1][is_repeated]
    is_first = last < 0
    return np.where(is_first, 0, np.arange(len(values)) - last), values[is_first]


def from_distances(coded: Ints, first: Ints) -> Ints:
    """Decodes ``distances``.

    Args:
        coded: The distances. Shape (n,).
        first: The values that appear for the first time, in order.

    Raises:
        ValueError: A distance points outside the table, or their number does not match.
    """
    rows = np.arange(len(coded))
    is_first = coded == 0
    if np.any((coded < 0) | (coded > rows)) or int(is_first.sum()) != len(first):
        raise ValueError("its distances point outside the table")
    values = np.empty(len(coded), dtype=np.int64)
    values[is_first] = first
    for low in range(0, len(coded), _BLOCK):
        block = slice(low, low + _BLOCK)
        source = rows[block] - coded[block]
        is_before = source < low
        values[block][is_before] = values[source[is_before]]
        # Within the block, every row points to an earlier one, or to itself where its value is known.
        pointer = np.where(is_before, rows[block], source) - low
        while not np.array_equal(further := pointer[pointer], pointer):
            pointer = further
        values[block] = values[block][pointer]
    return values
