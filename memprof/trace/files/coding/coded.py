"""A column of texts, many of which are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memprof.trace.kept import kept
from memprof.trace.schema import Table, Texts


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of texts without an object for each row.

    Attributes:
        codes: Index of each row's text in ``distinct``.
        distinct: The distinct texts, including "" for missing ones.
    """

    codes: npt.NDArray[np.int32]
    distinct: Texts

    @staticmethod
    def of(texts: Texts) -> Coded:
        """Dictionary-encodes texts."""
        known: dict[str, int] = {}
        codes = np.fromiter((known.setdefault(text, len(known)) for text in texts.tolist()), np.int32, len(texts))
        distinct: Texts = np.empty(len(known), dtype=object)
        distinct[:] = list(known)
        return Coded(codes, distinct)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Any:
        """Returns the texts of some rows."""
        return self.distinct[self.codes[rows]]


@kept
def coded_column(table: Table, name: str) -> Coded:
    """Returns a column of texts of a table, encoded once."""
    return Coded.of(getattr(table, name))
