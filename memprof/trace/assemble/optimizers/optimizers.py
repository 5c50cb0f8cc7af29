"""Builds the table of optimizers, each in its last recorded state."""

from __future__ import annotations

import json
import math
from typing import Any

from memprof.trace.assemble import texts
from memprof.trace.assemble.optimizers.optimizer_state import full_state_bytes
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Optimizers


def optimizer_table(spool: Spool) -> Optimizers:
    """Lists the optimizers; where one has several records, the last one counts."""
    last: dict[int, dict[str, Any]] = {}
    for batch in spool.records.get("optimizers", []):
        last.update({record["number"]: record for record in batch})
    records = [last[number] for number in sorted(last)]
    shapes = [[shape for group in record["groups"] for shape in group["parameters"]] for record in records]
    full = [full_state_bytes(record["algorithm"], record["groups"], record["scalar_bytes"]) for record in records]
    return Optimizers.of(
        optimizer_id=list(range(len(records))),
        name=texts.as_texts([record["name"] for record in records]),
        settings=texts.as_texts([_settings(record) for record in records]),
        parameters=[sum(times for _, _, times in each) for each in shapes],
        parameter_bytes=[sum(times * item * math.prod(sizes) for sizes, item, times in each) for each in shapes],
        elements=[sum(times * math.prod(sizes) for sizes, _, times in each) for each in shapes],
        state_bytes=[record["state_bytes"] for record in records],
        full_state_bytes=[NONE if each is None else each for each in full],
        updates=[record["updates"] for record in records],
    )


def _settings(record: dict[str, Any]) -> str:
    groups = record["groups"]
    return json.dumps(groups[0]["settings"] if groups else {}, sort_keys=True)
