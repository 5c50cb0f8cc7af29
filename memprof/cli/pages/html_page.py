"""An HTML page that needs no network, and tables of facts on it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from memprof.analysis.table import Cell, FactTable

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 15px; margin-top: 24px; }}
table {{ border-collapse: collapse; }} th, td {{ padding: 2px 14px 2px 0; border-bottom: 1px solid #8886; }}
th {{ text-align: left; }} td {{ overflow-wrap: anywhere; vertical-align: top; }}
.number {{ text-align: right; white-space: nowrap; }}
.fail {{ color: #d1242f; font-weight: 600; }} .warn {{ color: #9a6700; }} .pass {{ color: #1a7f37; }}
svg {{ width: 100%; height: auto; }} text {{ font-size: 12px; fill: currentColor; }} line {{ stroke: #8886; }}
polyline {{ fill: none; stroke: #0969da; stroke-width: 2; }}
circle {{ fill: #0969da; }} circle.changed {{ fill: #d1242f; }}
</style></head><body>
{body}
</body></html>
"""


def html_page(title: str, body: str) -> str:
    """Returns a page."""
    return _PAGE.format(title=escape(title), body=body)


def html_table(facts: FactTable, short: Callable[[str], str] = str) -> str:
    """Returns a table of facts."""
    kinds = [' class="number"' if column.unit.is_number else "" for column in facts.columns]

    def lines(cell: Cell) -> str:
        return "<br>".join(escape(short(line)) for line in (cell.text, *cell.lines))

    head = "".join(
        f"<th{kind}>{escape(column.heading or '')}</th>" for column, kind in zip(facts.columns, kinds, strict=True)
    )
    rows = (
        "".join(f"<td{kind}>{lines(cell)}</td>" for cell, kind in zip(row.cells, kinds, strict=True))
        for row in facts.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
