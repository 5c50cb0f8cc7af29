"""HTML generation: anything not marked as HTML is text and is escaped."""

from __future__ import annotations

import html
import re

from memprof.analysis.table import Cell, FactTable
from memprof.units import printable
from memprof_dashboard.palette import fill_of

#: Longest name shown in full.
LONGEST = 90
_LONGEST_TOOLTIP = 1_000
#: Where a name may break: behind a dot, slash or underscore, before a letter.
_BREAKS = re.compile(r"(?<=[._/])(?=[^\W\d_])(?!py\b)")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(part: str) -> Html:
    """Returns a part as HTML, escaped unless it already is HTML."""
    return part if isinstance(part, Html) else Html(html.escape(printable(part)))


def element(tag: str, *parts: str, **attributes: str) -> Html:
    """Returns an element; ``kind`` stands for the attribute ``class``."""
    named = {"class" if name == "kind" else name.replace("_", "-"): value for name, value in attributes.items()}
    written = "".join(f' {name}="{html.escape(printable(value))}"' for name, value in named.items() if value)
    return Html(f"<{tag}{written}>{''.join(map(text, parts))}</{tag}>")


def name(part: str, longest: int = LONGEST, kind: str = "name") -> Html:
    """Returns a name from a trace, cut in the middle where it is long; its tooltip is longer. Words are not broken."""
    shown = printable(part)
    words = Html(_BREAKS.sub("<wbr>", html.escape(shorten(shown, longest))))
    return element("span", words, kind=kind, title=shorten(shown, _LONGEST_TOOLTIP) if len(shown) > longest else "")


def shorten(part: str, longest: int) -> str:
    """Returns a text, cut in the middle where it exceeds ``longest`` characters."""
    return part if len(part) <= longest else f"{part[: longest // 2]}…{part[-longest // 2 :]}"


def table(facts: FactTable) -> Html:
    """Returns a table of facts."""
    kinds = ["number" if column.unit.is_number and not column.is_bar else "" for column in facts.columns]
    top = [
        element("th", column.heading or "", scope="col", kind=kind, title=column.meaning)
        for column, kind in zip(facts.columns, kinds, strict=True)
    ]
    body = [
        element(
            "tr",
            *(element("td", _cell(cell), kind=kind) for cell, kind in zip(row.cells, kinds, strict=True)),
            kind=row.kind,
        )
        for row in facts.rows
    ]
    whole = element("table", element("thead", element("tr", *top)), element("tbody", *body))
    return element("div", whole, kind="table")


def _cell(cell: Cell) -> Html:
    fill = fill_of(cell.category)
    if cell.bar:
        bar = element("span", kind="bar", style=f"width:{100 * cell.bar:.1f}%;background:{fill.colour}")
        return element("div", bar, kind="bars", aria_hidden="true")
    if cell.category:
        if not cell.text:
            return Html("")
        swatch = element("span", kind="swatch", style=f"background:{fill.colour}")
        return element("span", swatch, name(fill.label, 40), kind="category")
    parts = [name(cell.text)]
    if cell.soft:
        parts.append(name(cell.soft, 40, kind="name type"))
    lines = [Html(" ".join(parts)), *map(name, cell.lines)]
    found = Html("<br>".join(lines))
    return element("div", found, style=f"padding-left:{1.3 * cell.depth:.1f}em") if cell.depth else found


def section(title: str, about: str, *parts: str, level: int = 2) -> Html:
    """Returns parts under a title, with a sentence about them."""
    return Html("".join([element(f"h{level}", title), element("p", about, kind="about") if about else "", *parts]))


_HEADING = re.compile("<h2>(.*?)</h2>")


def with_contents(body: str) -> str:
    """Returns a page with a list of its sections before the first one; sections get numbers as names.

    Args:
        body: HTML whose sections begin with ``section``'s headings.
    """
    titles = _HEADING.findall(body)
    if not titles:
        return body
    numbers = iter(range(len(titles)))
    numbered = _HEADING.sub(lambda match: f'<h2 id="section-{next(numbers)}">{match[1]}</h2>', body)
    # The titles are HTML already: they are taken from the page.
    items = (f'<li><a href="#section-{number}">{title}</a></li>' for number, title in enumerate(titles))
    contents = f'<nav aria-label="contents"><ul>{"".join(items)}</ul></nav>\n'
    return numbered.replace('<h2 id="section-0">', f'{contents}<h2 id="section-0">', 1)
