"""What an attach runs in the job, on its main thread: each function writes its answer beside the request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.recorder.memory.present import write_present

_SPOOL = "present"


def dump(folder: str, request: str, arguments: Mapping[str, Any]) -> None:
    """Writes what is alive now to the folder ``present``."""
    begun = time.perf_counter()
    write_present(Path(folder) / _SPOOL)
    _answer(request, pause_s=time.perf_counter() - begun)


def _answer(request: str, **answer: Any) -> None:
    with open(f"{request}.new", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(f"{request}.new", f"{request}.json")
