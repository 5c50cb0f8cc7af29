"""An estimate as JSON: bytes as numbers, stable keys."""

from __future__ import annotations

from memprof.analysis.estimate.against import Compared
from memprof.analysis.estimate.estimate import Estimate, OnMachine
from memprof.analysis.estimate.term import GROUPS
from memprof.json_values import Json, to_json

#: Schema version; incremented when a key changes meaning or is removed.
ESTIMATE_SCHEMA = 1


def estimate_to_json(
    found: Estimate, on: OnMachine | None = None, compared: tuple[Compared, ...] | None = None
) -> Json:
    """Returns an estimate ready for ``json.dump``.

    Args:
        found: The estimate.
        on: The machine it is compared with.
        compared: The recording it is compared with, part by part.
    """
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
        record["compared"] = [_compared(one) for one in compared]
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


def _compared(one: Compared) -> Json:
    return {
        "part": one.name,
        "estimated_bytes": one.estimated_bytes,
        "recorded_bytes": one.recorded_bytes,
        "error_bytes": one.error_bytes,
        "error_ratio": one.error_ratio,
        "against": one.what,
    }
