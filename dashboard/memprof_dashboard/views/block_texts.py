"""Texts and tables of the blocks view; names from a trace are children of components only."""

from __future__ import annotations

from typing import Any

from dash import html

from memprof.trace.schema import NONE
from memprof.units import format_bytes
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.storage_lives import Blocks, IdleStorages, StorageLives

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
        *_after(", owned by ", owner_name(rank, row)),
        *_after(", allocated by ", maker_name(rank, row)),
        f"; {life_sentence(lives, row)}. ",
    ]


def _after(text: str, name: str) -> list[Any]:
    return [text, parts.name(name, 60)] if name else []


def life_sentence(lives: StorageLives, row: int) -> str:
    """Returns when a storage is allocated, freed and last used."""
    history = lives.history
    created, freed, last = int(history.created[row]), int(history.freed[row]), int(lives.last_use[row])
    born = "allocated before recording" if created == NONE else f"allocated at operator {created:,}"
    used = "no use recorded" if last == NONE else f"last used at {last:,}"
    held = int(lives.right[row] - lives.idle[row])
    died = "not freed" if freed == NONE else f"freed after {freed:,}"
    return f"{born}, {used}, {died}" + (f": held for {held:,} operators after its last use" if held > 0 else "")


def drawn_sentence(chosen: Blocks, find: str) -> str:
    """Returns how much of the range is drawn."""
    what = f"blocks matching {find!r}" if find else "blocks live in this range"
    if len(chosen.rows) == chosen.alive:
        return f"All {chosen.alive:,} {what} are drawn."
    return (
        f"The {len(chosen.rows):,} largest of {chosen.alive:,} {what} are drawn ({_percent(chosen.share)} of their "
        "bytes \N{MULTIPLICATION SIGN} operators); zoom in to see smaller ones."
    )


def placed_sentence(chosen: Blocks) -> str:
    """Returns the meaning of the y axis."""
    if not len(chosen.rows):
        return ""
    if chosen.floor >= chosen.top:
        return (
            "The recording has no addresses: heights are packed (each block in the lowest free place when allocated)."
        )
    gaps = f"; gaps larger than {format_bytes(chosen.cut_bytes)} are cut out" if chosen.cuts else ""
    unknown = (
        "; blocks allocated before recording have no known address and are stacked at the bottom"
        if chosen.floor
        else ""
    )
    return f"Heights are the allocator's addresses{gaps}{unknown}. Blank space between blocks is free."


def _percent(share: float) -> str:
    """Formats a share; only exactly 1 is shown as 100 %."""
    text = f"{share:.1%}"
    return "more than 99.9%" if text == "100.0%" and share < 1 else text


def waste_table(rank: Rank, lives: StorageLives, idle: IdleStorages, button: str) -> Any:
    """Returns the table of the largest wasters; sizes are buttons with ids of the given type."""
    head = html.H3("Held after last use")
    if not len(lives.last_use) or lives.last_use.max(initial=NONE) == NONE:
        return [head, parts.note("The recording contains no tensor uses, so idle tensors cannot be identified.")]
    if not len(idle.rows):
        return [head, parts.note("No tensor in this range outlives its last use.")]
    sentence = (
        f"{_percent(idle.share)} of the bytes \N{MULTIPLICATION SIGN} operators of this range are held by storages "
        "after their last use. "
        f"Largest {len(idle.rows)}:"
    )
    heads = [
        ">size",
        "name",
        "allocated by",
        ">last use",
        ">freed after",
        ">operators idle",
        ">bytes \N{MULTIPLICATION SIGN} operators",
    ]
    return [
        head,
        parts.note(sentence),
        parts.table(
            heads,
            [_idle_row(rank, lives, idle, place, button) for place in range(len(idle.rows))],
            label="held after last use",
        ),
    ]


def _idle_row(rank: Rank, lives: StorageLives, idle: IdleStorages, place: int, button: str) -> list[Any]:
    history, row = rank.history, int(idle.rows[place])
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
        parts.name(maker_name(rank, row) or "before recording", 36),
        f"{int(lives.last_use[row]):,}",
        "not freed" if freed == NONE else f"{freed:,}",
        f"{int(idle.held[place]):,}",
        format_bytes(float(idle.waste[place])),
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
    heads = [">bytes", "category", "owner", "allocated by", ">allocated at", ">last use", ">freed after"]
    return parts.as_table(heads, body, label=f"{len(body)} largest blocks drawn")
