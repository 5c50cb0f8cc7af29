"""Passes the values that a recorded job read on to its dry runs, which replay them."""

from __future__ import annotations

import json
from pathlib import Path

from memprof.errors import MemprofError
from memprof.trace.schema import ReadValues
from memprof.trace.store import Trace


def read_values_of(recording: Path | str) -> str:
    """Returns the values that a recorded job read, as JSON for the processes of its dry runs.

    Args:
        recording: The recording of the job.

    Returns:
        Rows of the table ``read_values``; "" if it has none, or cannot be read.
    """
    try:
        values = Trace.open(recording).table(ReadValues)
    except MemprofError:
        return ""
    columns = (values.step, values.line, values.name, values.previous, values.elements, values.value)
    return json.dumps(list(zip(*(column.tolist() for column in columns), strict=True))) if len(values) else ""
