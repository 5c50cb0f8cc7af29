"""Builds the table of the device driver's memory samples."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.files.spool import Spool
from memprof.trace.schema import DeviceMemory


def device_samples(spool: Spool) -> DeviceMemory:
    """Builds the table of whole-device samples over the whole recording."""
    samples = spool.columns("device_memory")
    names = texts.listed(spool, "devices")
    return DeviceMemory.of(
        time_us=samples["time_ns"] / 1000,
        device=np.array([names[number] for number in samples["device"].tolist()], dtype=np.object_),
        total_bytes=samples["total_bytes"],
        used_bytes=samples["used_bytes"],
        process_bytes=samples["process_bytes"],
        reserved_bytes=samples["reserved_bytes"],
        pinned_bytes=samples["pinned_bytes"],
    )
