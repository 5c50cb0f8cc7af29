"""Texts and tables of the blocks view; names from a trace are children of components only."""

from __future__ import annotations

from typing import Any

from dash import html

from memprof.trace.schema import NONE
from memprof.units import format_bytes
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.storage_lives import Blocks, StorageLives, Wasters

#: Rows of the table of blocks at most.
_MOST_ROWS = 100


def hover_text(rank: Rank, row: int) -> str:
    """Returns size, owner and operator of a storage."""
    owner, maker = owner_name(rank, row), maker_name(rank, row)
    return ", ".join(part for part in (format_bytes(int(rank.history.size[row])), owner, maker) if part)


def owner_name(rank: Rank, row: int) -> str:
    """Returns the name of a storage: its own, else its module's; "" for neither."""
    return str(rank.storage_texts["name"][row]) or rank.module_title(int(rank.history.owner[row]))


def maker_name(rank: Rank, row: int) -> str:
    """Returns the operator that allocated a storage, "" for one allocated before recording."""
    created = int(rank.history.created[row])
    return "" if created == NONE else str(rank.op_names[created]).removesuffix(".default")


def storage_line(rank: Rank, lives: StorageLives, row: int) -> list[Any]:
    """Returns a storage's owner and lifetime."""
    history = rank.history
    category = fill_of(history.storage_categories[history.category[row]])
    return [
        html.Span(className="swatch", style={"background": category.colour}),
        html.Strong(f"{format_bytes(int(history.size[row]))}, {category.label}"),
        f", storage {row:,}",
        *_after(", of ", owner_name(rank, row)),
        *_after(", made by ", maker_name(rank, row)),
        f"; {life_sentence(lives, row)}. ",
    ]


def _after(text: str, name: str) -> list[Any]:
    return [text, parts.name(name, 60)] if name else []


def life_sentence(lives: StorageLives, row: int) -> str:
    """Returns when a storage is allocated, freed and last used."""
    history = lives.history
    created, freed, last = int(history.created[row]), int(history.freed[row]), int(lives.last_use[row])
    born = "alive before the recording" if created == NONE else f"born at operator {created:,}"
    used = "no use of it was recorded" if last == NONE else f"last used at {last:,}"
    held = int(lives.right[row] - lives.idle[row])
    died = "alive at the end" if freed == NONE else f"freed after {freed:,}"
    return f"{born}, {used}, {died}" + (f": held for {held:,} operators after its last use" if held > 0 else "")


def drawn_sentence(chosen: Blocks, find: str) -> str:
    """Returns how much of the range is drawn."""
    what = f"blocks that have {find!r} in their names" if find else "blocks alive in this stretch"
    if len(chosen.rows) == chosen.alive:
        return f"All {chosen.alive:,} {what} are drawn."
    return (
        f"The {len(chosen.rows):,} largest of {chosen.alive:,} {what} are drawn, {_percent(chosen.share)} of their "
        "bytes times operators; zoom in to see smaller ones."
    )


def placed_sentence(chosen: Blocks) -> str:
    """Returns the meaning of the y axis."""
    if not len(chosen.rows):
        return ""
    if chosen.floor >= chosen.top:
        return (
            "Heights are packed (each block in the lowest place free when it is born): the recording does not tell "
            "addresses."
        )
    gaps = f"; gaps of more than {format_bytes(chosen.cut_bytes)} are cut out" if chosen.cuts else ""
    unknown = "; blocks whose address is not told (they were there before) are packed below" if chosen.floor else ""
    return f"Heights are the allocator's real addresses{gaps}{unknown}. What is blank between blocks is free."


def _percent(share: float) -> str:
    """Formats a share; only exactly 1 is shown as 100 %."""
    text = f"{share:.1%}"
    return "more than 99.9%" if text == "100.0%" and share < 1 else text


def waste_table(rank: Rank, lives: StorageLives, wasters: Wasters, button: str) -> Any:
    """Returns the table of the largest wasters; sizes are buttons with ids of the given type."""
    head = html.H3("Held after the last use")
    if not len(lives.last_use) or lives.last_use.max(initial=NONE) == NONE:
        return [head, parts.note("The recording holds no uses of tensors, so it cannot tell which outlive theirs.")]
    if not len(wasters.rows):
        return [head, parts.note("Nothing in this stretch outlives its last use.")]
    sentence = (
        f"Storages that no operator uses any more hold {_percent(wasters.share)} of this stretch's bytes times "
        f"operators. The {len(wasters.rows)} that waste most:"
    )
    heads = [
        ">size",
        "what",
        "made by",
        ">last use",
        ">freed after",
        ">operators held unused",
        ">bytes times operators",
    ]
    return [
        head,
        parts.note(sentence),
        parts.table(
            heads, [_waster(rank, lives, wasters, place, button) for place in range(len(wasters.rows))], label="waste"
        ),
    ]


def _waster(rank: Rank, lives: StorageLives, wasters: Wasters, place: int, button: str) -> list[Any]:
    history, row = rank.history, int(wasters.rows[place])
    freed = int(history.freed[row])
    category = fill_of(history.storage_categories[history.category[row]])
    chooser = html.Button(
        format_bytes(int(history.size[row])),
        id={"type": button, "row": row},
        type="button",
        title=f"{int(history.size[row]):,} bytes",
    )
    return [
        chooser,
        [
            html.Span(className="swatch", style={"background": category.colour}, title=category.label),
            parts.name(owner_name(rank, row) or category.label, 48),
        ],
        parts.name(maker_name(rank, row) or "before the recording", 36),
        f"{int(lives.last_use[row]):,}",
        "alive at the end" if freed == NONE else f"{freed:,}",
        f"{int(wasters.held[place]):,}",
        format_bytes(float(wasters.waste[place])),
    ]


def blocks_table(rank: Rank, lives: StorageLives, chosen: Blocks) -> Any:
    """Returns the table of the largest blocks drawn."""
    history, rows = rank.history, chosen.rows[:_MOST_ROWS]
    body = [
        [
            f"{int(history.size[row]):,}",
            fill_of(history.storage_categories[history.category[row]]).label,
            parts.name(owner_name(rank, row), 60),
            parts.name(maker_name(rank, row), 40),
            "" if history.created[row] == NONE else int(history.created[row]),
            "" if lives.last_use[row] == NONE else int(lives.last_use[row]),
            "" if history.freed[row] == NONE else int(history.freed[row]),
        ]
        for row in rows.tolist()
    ]
    heads = [">bytes", "category", "of", "made by", ">born at", ">last use", ">freed after"]
    return parts.as_table(heads, body, label=f"the {len(body)} largest blocks drawn")
