"""How full a whole device is, and whose what is: the bar that nvidia-smi shows, taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.files.columns import Coded
from memprof.trace.schema import NONE, DeviceMemory


@dataclass(frozen=True)
class DeviceUse:
    """One device at the moment it was fullest. All bytes; the parts sum to the total.

    Attributes:
        device: Such as ``cuda:0``.
        total_bytes: Memory of the device.
        reserved_bytes: Segments of torch's caching allocator in the recorded process.
        own_bytes: What that process holds beside: the CUDA context, NCCL, libraries. None where the driver does not
            tell processes apart; it is in ``other_bytes`` then.
        other_bytes: Everything else that is in use.
        free_bytes: What nobody has taken.
        pinned_bytes: Host memory that torch held pinned, which is none of the device's; None where unknown.
    """

    device: str
    total_bytes: int
    reserved_bytes: int
    own_bytes: int | None
    other_bytes: int
    free_bytes: int
    pinned_bytes: int | None

    @property
    def used_bytes(self) -> int:
        """What nvidia-smi shows as used."""
        return self.total_bytes - self.free_bytes


def summarise_devices(samples: DeviceMemory) -> tuple[DeviceUse, ...]:
    """Returns each device at the sample in which most of it was used, in the order of their names."""
    found = []
    coded = Coded.of(samples.device)  # numpy itself compares texts without the zero bytes at their end
    present = np.unique(coded.codes).tolist()
    for code in sorted(present, key=lambda code: str(coded.distinct[code])):
        device, own = coded.distinct[code], samples.take(coded.codes == code)
        fullest = int(np.argmax(own.used_bytes))
        used, reserved, process, pinned = (
            int(column[fullest]) for column in (own.used_bytes, own.reserved_bytes, own.process_bytes, own.pinned_bytes)
        )
        # Samples of the driver and of torch are not of one instant.
        beside = max(used - reserved, 0)
        of_process = None if process == NONE else min(max(process - reserved, 0), beside)
        found.append(
            DeviceUse(
                device=str(device),
                total_bytes=int(own.total_bytes[fullest]),
                reserved_bytes=used - beside,
                own_bytes=of_process,
                other_bytes=beside - (of_process or 0),
                free_bytes=int(own.total_bytes[fullest]) - used,
                pinned_bytes=None if pinned == NONE else pinned,
            )
        )
    return tuple(found)
