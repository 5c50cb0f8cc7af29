"""HTML generation: anything not marked as HTML is text and is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

#: Longest name shown in full.
LONGEST = 90
_LONGEST_TOOLTIP = 1_000


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def visible(text: str) -> str:
    """Returns a text with invisible and bidirectional control characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def text(part: str) -> Html:
    """Returns a part as HTML, escaped unless it already is HTML."""
    return part if isinstance(part, Html) else Html(html.escape(visible(part)))


def element(tag: str, *parts: str, **attributes: str) -> Html:
    """Returns an element; ``kind`` stands for the attribute ``class``."""
    named = {"class" if name == "kind" else name.replace("_", "-"): value for name, value in attributes.items()}
    written = "".join(f' {name}="{html.escape(visible(value))}"' for name, value in named.items() if value)
    return Html(f"<{tag}{written}>{''.join(map(text, parts))}</{tag}>")


def name(part: str, longest: int = LONGEST, kind: str = "name") -> Html:
    """Returns a name from a trace, cut in the middle where it is long; its tooltip is longer."""
    shown = visible(part)
    if len(shown) <= longest:
        return element("span", shown, kind=kind)
    return element("span", shorten(shown, longest), kind=kind, title=shorten(shown, _LONGEST_TOOLTIP))


def shorten(part: str, longest: int) -> str:
    """Returns a text, cut in the middle where it exceeds ``longest`` characters."""
    return part if len(part) <= longest else f"{part[: longest // 2]}…{part[-longest // 2 :]}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: dict[int, str] | None = None) -> Html:
    """Returns a table.

    Args:
        heads: Heads of the columns; those that begin with ``>`` are of numbers.
        rows: Cells; a cell that is not HTML is a name.
        marked: Classes of some rows, by place.
    """
    kinds = ["number" if head.startswith(">") else "" for head in heads]
    top = [
        element("th", head.removeprefix(">"), scope="col", kind=kind) for head, kind in zip(heads, kinds, strict=True)
    ]
    body = [
        element(
            "tr",
            *(
                element("td", cell if isinstance(cell, Html) else name(cell), kind=kind)
                for cell, kind in zip(row, kinds, strict=True)
            ),
            kind=(marked or {}).get(place, ""),
        )
        for place, row in enumerate(rows)
    ]
    whole = element("table", element("thead", element("tr", *top)), element("tbody", *body))
    return element("div", whole, kind="table")


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
