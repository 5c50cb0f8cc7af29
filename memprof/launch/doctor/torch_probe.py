"""Runs in a separate process: prints, as JSON on its last line, this Python's torch and what it offers a recorder.

If torch cannot be imported, the process ends with torch's own error; the examination continues without.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def probe(*, builds: bool) -> dict[str, Any]:
    """Imports torch and queries its capabilities.

    Args:
        builds: Build the listener first.
    """
    import torch

    from memprof.recorder.device_sampling import driver_version
    from memprof.recorder.profiler.listener import build, library_path, why_none
    from memprof.recorder.profiler.native import AllocatorTable, NativeEvents

    fault = build() if builds else ""

    has_cuda = bool(torch.cuda.is_available())
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() if has_cuda else 0)]
    return {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "hears_events": NativeEvents.is_available(),
        "lacks_listener": (lacks := fault or why_none()),
        "listener": "" if lacks else str(library_path()),
        "keeps_blocks": AllocatorTable().is_available,
        "cuda_build": str(torch.version.cuda or ""),
        "hip_build": str(torch.version.hip or ""),
        "has_cuda": has_cuda,
        "keeps_history": hasattr(torch._C, "_cuda_record_memory_history"),
        "devices": [
            {
                "name": card.name,
                "total_bytes": int(card.total_memory),
                "capability": f"{card.major}.{card.minor}",
                "multiprocessors": int(card.multi_processor_count),
            }
            for card in cards
        ],
        "has_xpu": bool(hasattr(torch, "xpu") and torch.xpu.is_available()),
        "has_mps": bool(torch.backends.mps.is_available()),
        "driver": driver_version(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    # This folder's modules must not shadow others by their bare names, and memprof may not be on Python's own path.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [*(path for path in sys.path if path != here), sys.argv[1]]
    print(json.dumps(probe(builds=sys.argv[2:] == ["--build"])))
