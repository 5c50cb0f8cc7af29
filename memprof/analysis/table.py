"""Tables of facts: columns declared once, from which text, Markdown, HTML, JSON and JSON Schema are made.

A column says what a fact is called, in which unit it is and how it is read from a row; a medium only draws the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from memprof.json_values import Json, to_json
from memprof.units import format_bytes, format_bytes_change, format_percent, format_percent_change, format_us

Read = Callable[[Any], Any]


@dataclass(frozen=True)
class Cell:
    """One cell as every medium draws it.

    Attributes:
        text: Its text.
        soft: Words behind it that matter less.
        title: What it says in full, where a medium can show that on demand.
        lines: Further lines below the text.
        depth: Levels of indentation.
        category: The category of memory whose colour it has.
        bar: Length of a bar of that colour: a part of the table's whole, in a table a share of it.
        tone: ``good`` for what fits, ``bad`` for what does not, "" for others.
    """

    text: str
    soft: str = ""
    title: str = ""
    lines: tuple[str, ...] = ()
    depth: int = 0
    category: str = ""
    bar: float = 0.0
    tone: str = ""


@dataclass(frozen=True)
class Unit:
    """What the values of a column are.

    Attributes:
        json_type: Their type in JSON Schema.
        show: Writes one that is known.
        is_number: They are compared by their digits, which therefore stand below each other.
        is_whole_line: They are never wrapped, and cut in the middle.
        is_share: They are shown as a share of the table's whole.
        wraps: They are sentences: wrapped, never cut.
        has_names: They are wrapped between names, of which long ones are cut in the middle.
        items: What arrays and objects hold: a type in JSON Schema, or the columns of rows; "" for anything.
    """

    json_type: str
    show: Callable[[Any], str] = str
    is_number: bool = False
    is_whole_line: bool = False
    is_share: bool = False
    wraps: bool = False
    has_names: bool = False
    items: str | tuple[Column, ...] = ""


BYTES = Unit("integer", format_bytes, is_number=True)
BYTES_CHANGE = Unit("integer", format_bytes_change, is_number=True)
US = Unit("number", format_us, is_number=True)
COUNT = Unit("integer", "{:,}".format, is_number=True)
#: A number that names something, as options take it.
NUMBER = Unit("integer", is_number=True)
#: A share of the table's whole, of values in the unit of that.
SHARE = Unit("number", format_percent, is_number=True, is_share=True)
FRACTION = Unit("number", format_percent, is_number=True)
#: What is added to a whole, as a share of it.
RATIO_CHANGE = Unit("number", format_percent_change, is_number=True)
#: Text that begins with a number.
FIGURE = Unit("string", is_number=True)
TEXT = Unit("string")
#: A module, file or line.
NAME = Unit("string", is_whole_line=True)
#: A sentence, or what is to be read as a whole.
WORDS = Unit("string", wraps=True)
#: A plan: policies with the names of modules.
NAMES = Unit("string", wraps=True, has_names=True)
TRUTH = Unit("boolean")
TEXTS = Unit("array", items="string")
NUMBERS = Unit("array", is_number=True, items="integer")
FLOATS = Unit("array", is_number=True, items="number")
OBJECT = Unit("object")
#: Bytes by name.
SIZES = Unit("object", items="integer")


def rows_of(columns: tuple[Column, ...]) -> Unit:
    """Returns the unit of a value that is rows of a table of its own."""
    return Unit("array", items=columns)


def row_of(columns: tuple[Column, ...]) -> Unit:
    """Returns the unit of a value that is one such row."""
    return Unit("object", items=columns)


@dataclass(frozen=True)
class Column:
    """One fact of each row.

    Attributes:
        key: Its key in JSON.
        heading: Its heading; None where it is in JSON alone.
        unit: What its values are.
        read: Returns the value of a row, None where it is unknown; by default the row's attribute of the same name.
        meaning: What it is, where the heading does not say that.
        in_json: Whether it is in JSON; the key then only names it.
        missing: What stands for an unknown value.
        is_optional: Left out where no row has a value.
        is_wide: Left out of text, where there is no room for it.
        is_bar: A picture of another column: left out of text that is not on a terminal.
        gives_way: Left out of text that is too narrow for all columns, the one of the highest number first; 0: never.
    """

    key: str
    heading: str | None = None
    unit: Unit = TEXT
    read: Read | None = None
    meaning: str = ""
    in_json: bool = True
    missing: str = ""
    is_optional: bool = False
    is_wide: bool = False
    is_bar: bool = False
    gives_way: int = 0

    def value(self, item: Any) -> Any:
        """Returns the value of a row."""
        return (self.read or attrgetter(self.key))(item)

    def json(self, item: Any) -> Any:
        """Returns the value of a row as JSON containers."""
        value = self.value(item)
        if value is None or isinstance(self.unit.items, str):
            return to_json(value)
        return (records if self.unit.json_type == "array" else record)(self.unit.items, value)

    def cell(self, value: Any, whole: float = 0) -> Cell:
        """Returns a value as a cell."""
        if isinstance(value, Cell):
            return replace(value, bar=value.bar / whole) if value.bar and whole > 0 else value
        if value is None or value == "":
            return Cell(self.missing)
        if self.unit.is_share:
            return Cell(self.unit.show(value / whole) if whole > 0 else "")
        return Cell(self.unit.show(value), title=f"{value:,} B" if self.unit in (BYTES, BYTES_CHANGE) else "")


def shown(heading: str, unit: Unit = TEXT, read: Read | None = None, **more: Any) -> Column:
    """Returns a column that JSON has no key for: it follows from others."""
    return Column(more.pop("key", heading), heading, unit, read, in_json=False, **more)


@dataclass(frozen=True)
class Row:
    """A row of cells.

    Attributes:
        cells: One for each column.
        kind: ``rest`` for what is left out, ``total`` for a sum of all, "" for others.
        item: What the cells were read from; None for a row that was added.
    """

    cells: tuple[Cell, ...]
    kind: str = ""
    item: Any = None


@dataclass
class FactTable:
    """Rows of facts with the columns that are shown.

    Attributes:
        columns: The columns.
        items: What rows are read from.
        whole: What shares are of.
        rest: Whether an item stands for what is left out.
        rows: The rows.
    """

    columns: tuple[Column, ...]
    items: Iterable[Any]
    whole: float = 0
    rest: Callable[[Any], bool] = lambda item: False
    rows: list[Row] = field(init=False)
    _keys: set[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Reads the cells, and leaves out the optional columns without any."""
        items = list(self.items)
        headed = [column for column in self.columns if column.heading is not None]
        values = {column: [column.value(item) for item in items] for column in headed}
        self._keys = {column.key for column in headed}
        unknown = (None, "", Cell(""))
        self.columns = tuple(
            one for one in headed if not one.is_optional or any(value not in unknown for value in values[one])
        )
        cells = {column: [column.cell(value, self.whole) for value in values[column]] for column in self.columns}
        self.rows = [
            Row(tuple(cells[column][place] for column in self.columns), "rest" if self.rest(item) else "", item)
            for place, item in enumerate(items)
        ]

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return bool(self.rows)

    def add(self, kind: str, **values: Any) -> None:
        """Adds a row below the others, of values by key; it has no others.

        Raises:
            KeyError: No column has such a key.
        """
        if unknown := values.keys() - self._keys:
            raise KeyError(*unknown)
        self.rows.append(Row(tuple(one.cell(values.get(one.key, Cell("")), self.whole) for one in self.columns), kind))


def sized_parts(heading: str, parts: Mapping[str, int], whole: int) -> FactTable:
    """Returns a table of bytes by name, with their shares of a whole."""
    columns = (
        shown(heading, TEXT, lambda part: part[0], key="part"),
        shown("bytes", BYTES, lambda part: part[1]),
        shown("share", SHARE, lambda part: part[1]),
    )
    return FactTable(columns, parts.items(), whole)


def record(columns: Iterable[Column], item: Any) -> Json:
    """Returns a row as a JSON object."""
    return {column.key: column.json(item) for column in columns if column.in_json}


def records(columns: Iterable[Column], items: Iterable[Any]) -> list[Json]:
    """Returns rows as JSON objects."""
    kept = [column for column in columns if column.in_json]
    return [record(kept, item) for item in items]


def row_schema(columns: Iterable[Column]) -> Json:
    """Returns the JSON Schema of a row; any value may be unknown."""
    kept = [column for column in columns if column.in_json]
    return {
        "type": "object",
        "properties": {column.key: _value_schema(column) for column in kept},
        "required": [column.key for column in kept],
    }


def _value_schema(column: Column) -> Json:
    unit = column.unit
    schema: Json = {"type": sorted({unit.json_type, "null"})}
    if unit.items:
        inside = {"type": unit.items} if isinstance(unit.items, str) else row_schema(unit.items)
        if unit.json_type == "object" and not isinstance(unit.items, str):
            schema = inside | schema
        else:
            schema["items" if unit.json_type == "array" else "additionalProperties"] = inside
    return schema | ({"description": column.meaning} if column.meaning else {})
