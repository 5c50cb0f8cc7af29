"""The claimed unpacked size of a Parquet file's pages, read from their headers before anything is unpacked.

The footer's figures are not binding: memory is allocated by the size in each page header. So a file of a few
kilobytes could be made to allocate gigabytes; such files are rejected here.

Source: parquet.thrift (PageHeader) and the compact protocol of Apache Thrift.
"""

from __future__ import annotations

from typing import Any

#: Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_UNPACKED, _PACKED = 2, 3
#: Maximum nesting depth of fields in a page header.
_DEEPEST = 6


class PageError(ValueError):
    """A page header cannot be read, or points outside the table."""


def unpacked_bytes(data: Any) -> int:
    """Sums the claimed unpacked size of all pages.

    Pages are contiguous from the file's magic to its footer, so the footer's column offsets need not be trusted;
    damaged offsets would crash the process inside Arrow.

    Args:
        data: The file, as written by Arrow.

    Raises:
        PageError: A header is damaged, or points outside the file.
    """
    view = memoryview(data)
    end = len(view) - 8 - int.from_bytes(view[-8:-4], "little")
    if end < 4:
        raise PageError("its footer is longer than the table")
    return _column_bytes(view, 4, end)


def _column_bytes(view: memoryview, position: int, end: int) -> int:
    total = 0
    while position < end:
        reader = _Reader(view, position, end)
        fields = reader.struct()
        unpacked, packed = fields.get(_UNPACKED), fields.get(_PACKED)
        if unpacked is None or packed is None or unpacked < 0 or packed < 0:
            raise PageError("a page header has no size")
        total += unpacked
        position = reader.position + packed
        if position > end:
            raise PageError("a page is longer than the table")
    return total


class _Reader:
    """Reads the integers of one struct and skips everything else."""

    def __init__(self, view: memoryview, position: int, end: int) -> None:
        self.position = position
        self._view = view
        self._end = end

    def struct(self, depth: int = 0) -> dict[int, int]:
        if depth > _DEEPEST:
            raise PageError("a page header is nested too deep")
        fields: dict[int, int] = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            kind, delta = head & 0x0F, head >> 4
            number = number + delta if delta else self._signed()
            if kind in (_I16, _I32, _I64):
                fields[number] = self._signed()
            else:
                self._skip(kind, depth)

    def _skip(self, kind: int, depth: int) -> None:
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self._move(1)
        elif kind == _DOUBLE:
            self._move(8)
        elif kind == _BINARY:
            self._move(self._unsigned())
        elif kind == _STRUCT:
            self.struct(depth + 1)
        else:
            # A page header holds no lists, sets or maps.
            raise PageError("a page header has an invalid field type")

    def _byte(self) -> int:
        self._move(1)
        return self._view[self.position - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise PageError("a page header holds a number that is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _move(self, count: int) -> None:
        self.position += count
        if self.position > self._end:
            raise PageError("a page header is cut short")
