"""An estimate as a page and as JSON: the total, each term with its formula, and what it is compared with."""

from __future__ import annotations

import shlex
from operator import attrgetter

from memprof.analysis.estimate.against import Compared
from memprof.analysis.estimate.estimate import MOST_RANKS, Estimate, OnMachine, describe_setting
from memprof.analysis.estimate.terms import GROUPS
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    FIGURE,
    RATIO_CHANGE,
    SHARE,
    TEXT,
    WORDS,
    Cell,
    Column,
    FactTable,
    records,
    shown,
)
from memprof.cli.page import Page
from memprof.json_values import Json, to_json
from memprof.machines.card import architecture_of
from memprof.units import format_bytes, format_bytes_change, format_percent

_WORDS = {"ends": "ends (embedding, head, loss)", "temporaries": "temporary"}
#: Schema version; incremented when a key changes meaning or is removed.
ESTIMATE_SCHEMA = 1


def fill_estimate(
    page: Page,
    found: Estimate,
    on: OnMachine | None,
    compared: tuple[Compared, ...] | None,
    trace: str,
    *,
    has_reasons: bool,
) -> None:
    """Adds an estimate to a page."""
    page.say(_verdict(found), "bold")
    page.say(describe_setting(found.setting, found.model), "dim")
    if on is not None:
        page.say(_on_machine(on, found), "" if on.fits else "yellow")
    page.add_section("By term", _terms(found), "of one rank")
    page.say(_letters(found), "dim")
    page.say(_moments(found), "dim")
    if compared is not None:
        page.add_section("Compared with the recording", FactTable(COMPARED, compared), trace)
    if has_reasons:
        _add_reasons(page, found)
    for note in found.model.notes:
        page.say(f"note: {note}", "dim")
    if isinstance(found.model.shape, int):
        page.say("note: a parameter count alone does not determine activations: give a shape", "dim")
    page.add_next(_next(on, trace))


def _verdict(found: Estimate) -> str:
    groups = found.by_group
    rank = " on each rank" if found.setting.ranks * found.setting.tensor_ranks > 1 else ""
    kept = f", activations {format_bytes(groups['activations'])}" if groups["activations"] else ""
    return (
        f"{found.model.name}: {format_bytes(found.total_bytes)}{rank} by formula, {found.parameters:,} parameters: "
        f"weights {format_bytes(groups['weights'])}, gradients {format_bytes(groups['gradients'])}, "
        f"optimizer {format_bytes(groups['optimizer'])}{kept}"
    )


def _on_machine(on: OnMachine, found: Estimate) -> str:
    machine, setting = on.machine, found.setting
    text = (
        f"{machine.name}: {format_percent(on.share)} of the {format_bytes(machine.budget_bytes)} it has for tensors "
        f"({machine.budget_source})"
    )
    text += "" if on.fits else ": does not fit"
    if on.least_ranks is None:
        smaller = "make the batch smaller" + ("" if setting.checkpoint == "layers" else ", or add --checkpoint layers")
        return f"{text}. Over {MOST_RANKS:,} ranks with ZeRO {on.zero} it does not fit, either: {smaller}."
    if on.least_ranks == 1:
        return f"{text}. One device suffices." if setting.zero else f"{text}."
    cards = on.least_ranks * setting.tensor_ranks
    return f"{text}. With ZeRO {on.zero}, {cards:,} devices suffice, each with this batch."


_TERMS = (
    shown("term", TEXT, lambda row: row[0]),
    shown("bytes", BYTES, lambda row: row[1]),
    shown("share", SHARE, lambda row: row[1]),
    shown("formula", WORDS, lambda row: row[2]),
)


def _terms(found: Estimate) -> FactTable:
    """Returns the bytes of each group of terms, and of its terms where it has several."""
    rows: list[tuple[Cell, int, str]] = []
    for group, size in found.by_group.items():
        terms = [term for term in found.terms if term.group == group]
        name = _WORDS.get(group, group)
        if sum(term.bytes for term in terms) > size:
            name += ", not all at once"
        if len(terms) == 1:
            name += "" if terms[0].name == group else f": {terms[0].name}"
            rows.append((Cell(name), size, terms[0].formula))
        elif terms:
            rows.append((Cell(name), size, ""))
            rows += [(Cell(term.name, depth=1), term.bytes, term.formula) for term in terms]
    table = FactTable(_TERMS, rows, found.total_bytes)
    table.add("total", term=Cell("total"), bytes=found.total_bytes, share=found.total_bytes)
    return table


def _moments(found: Estimate) -> str:
    """Returns what is alive at once if gradients are freed before forward."""
    words = {"loss": "at the loss", "backward": "where layers are recomputed", "update": "at the update"}
    moments = ", ".join(f"{format_bytes(size)} {words[name]}" for name, size in found.moments.items())
    return f"at once, where gradients are freed before forward: {moments}"


def _letters(found: Estimate) -> str:
    """Returns the legend of the formulas' variables."""
    meanings = {
        "P": "parameters",
        "Pm": "of a layer, in matrix products",
        "Pn": "outside the layers, in matrix products",
        "N": "ranks",
        "L": "layers",
        "h": "width",
        "a": "heads",
        "v": "vocabulary",
        "s": "tokens of a sample",
        "q": "width of queries",
        "k": "width of keys",
        "f": "width inside the MLP",
        "sb": "tokens at once",
        "b": "samples at once",
        "t": "tensor-parallel ranks",
        "Pl": "parameters of a layer",
        "Pe": "of the rest",
    }
    return ", ".join(f"{letter} = {value:,} ({meanings[letter]})" for letter, value in found.letters.items())


def _error(one: Compared) -> str:
    if not one.error_bytes:
        return "exact"
    ratio = one.error_ratio
    share = "" if ratio is None else f"{100 * ratio:+.2f} %" if abs(ratio) >= 0.00005 else "under 0.01 %"
    return f"{format_bytes_change(one.error_bytes)}{share and f' ({share})'}"


#: Parts of an estimate, compared with those of a recording.
COMPARED = (
    Column("part", "part", TEXT, attrgetter("name")),
    Column("estimated_bytes", "formula", BYTES),
    Column("recorded_bytes", "recorded", BYTES),
    Column("error_bytes", None, BYTES_CHANGE),
    Column("error_ratio", None, RATIO_CHANGE),
    shown("error", FIGURE, _error),
    Column("against", "compared with", WORDS, attrgetter("what")),
)


def _add_reasons(page: Page, found: Estimate) -> None:
    """Adds each term's source and limitations."""
    page.add("")
    page.say("Sources and limitations of the formulas", "bold")
    for term in found.terms:
        page.say(f"{term.name}: {term.formula}")
        page.say(f"  source: {term.source}", "dim")
        if term.not_when:
            page.say(f"  not when: {term.not_when}", "dim")
    if found.model.source:
        page.say(f"shape: {found.model.source}")


def _next(on: OnMachine | None, trace: str) -> tuple[str, str]:
    """Returns the command that measures what is estimated here."""
    if trace:
        return f"memprof report {shlex.quote(trace)}", "what the peak is made of"
    is_card = on is not None and architecture_of(on.machine.capability) is not None
    device = f" --device {shlex.quote(on.machine.name)}" if on is not None and is_card else ""
    return f"memprof record --dry-run{device} train.py", "your own script's peak, operator by operator"


def estimate_to_json(
    found: Estimate, on: OnMachine | None = None, compared: tuple[Compared, ...] | None = None
) -> Json:
    """Returns an estimate ready for ``json.dump``."""
    setting, groups = found.setting, found.by_group
    record: Json = {
        "schema": ESTIMATE_SCHEMA,
        "model": found.model.name,
        "parameters": found.parameters,
        **{f"{group}_bytes": groups[group] for group in GROUPS},
        "total_bytes": found.total_bytes,
        "moments": found.moments,
        "formula": _by_group(found, "formula", " + "),
        "source": _by_group(found, "source", "; "),
        "terms": to_json(found.terms),
        "letters": found.letters,
        "setting": {
            "tokens": setting.tokens,
            "length": setting.length,
            "samples": setting.samples,
            **to_json(setting),
        },
        "notes": list(found.model.notes),
        "machine": None if on is None else _machine(on),
    }
    if compared is not None:
        record["compared"] = records(COMPARED, compared)
    return record


def _by_group(found: Estimate, attribute: str, joint: str) -> dict[str, str]:
    """Joins the distinct texts of a group's terms."""
    texts: dict[str, dict[str, None]] = {group: {} for group in GROUPS}
    for term in found.terms:
        texts[term.group][getattr(term, attribute)] = None
    return {group: joint.join(each) for group, each in texts.items()}


def _machine(on: OnMachine) -> Json:
    return {
        "name": on.machine.name,
        "budget_bytes": on.machine.budget_bytes,
        "share": on.share,
        "fits": on.fits,
        "least_ranks": on.least_ranks,
        "zero": on.zero,
    }
