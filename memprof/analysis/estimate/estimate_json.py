"""An estimate as JSON: bytes as numbers, stable keys."""

from __future__ import annotations

from typing import Any

from memprof.analysis.estimate.against import Compared
from memprof.analysis.estimate.estimate import Estimate, OnMachine
from memprof.analysis.estimate.term import GROUPS, Term

#: Schema version; incremented when a key changes meaning or is removed.
ESTIMATE_SCHEMA = 1


def estimate_to_json(
    found: Estimate, on: OnMachine | None = None, compared: tuple[Compared, ...] | None = None
) -> dict[str, Any]:
    """Returns an estimate ready for ``json.dump``.

    Args:
        found: The estimate.
        on: The machine it is compared with.
        compared: The recording it is compared with, part by part.
    """
    setting, groups = found.setting, found.by_group
    record: dict[str, Any] = {
        "schema": ESTIMATE_SCHEMA,
        "model": found.model.name,
        "parameters": found.parameters,
        **{f"{group}_bytes": groups[group] for group in GROUPS},
        "total_bytes": found.total_bytes,
        "moments": found.moments,
        "formula": _by_group(found, "formula", " + "),
        "source": _by_group(found, "source", "; "),
        "terms": [_term(term) for term in found.terms],
        "letters": found.letters,
        "setting": {
            "tokens": setting.tokens,
            "length": setting.length,
            "samples": setting.samples,
            "micro_batches": setting.micro_batches,
            "precision": setting.precision.name,
            "optimizer": setting.optimizer,
            "checkpoint": setting.checkpoint,
            "checkpoint_every": setting.every,
            "zero": setting.zero,
            "ranks": setting.ranks,
            "tensor_ranks": setting.tensor_ranks,
            "sequence_parallel": setting.is_sequence_parallel,
            "flash": setting.has_flash,
            "dropout": setting.has_dropout,
            "device": "cpu" if setting.is_on_cpu else "cuda",
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


def _term(term: Term) -> dict[str, Any]:
    return {
        "group": term.group,
        "name": term.name,
        "bytes": term.bytes,
        "formula": term.formula,
        "source": term.source,
        "not_when": term.not_when,
    }


def _machine(on: OnMachine) -> dict[str, Any]:
    return {
        "name": on.machine.name,
        "budget_bytes": on.machine.budget_bytes,
        "share": on.share,
        "fits": on.fits,
        "least_ranks": on.least_ranks,
        "zero": on.zero,
    }


def _compared(one: Compared) -> dict[str, Any]:
    return {
        "part": one.name,
        "estimated_bytes": one.estimated_bytes,
        "recorded_bytes": one.recorded_bytes,
        "error_bytes": one.error_bytes,
        "error_ratio": one.error_ratio,
        "against": one.what,
    }
