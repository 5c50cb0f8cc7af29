"""Size rules of the CUDA caching allocator: how a request is rounded, and the size of a new segment for it.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

#: Block sizes and addresses are multiples of this.
ROUNDING_BYTES = 512
#: Requests up to this size, after rounding, are served from small segments.
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
#: Requests below this size share large segments of one size; larger ones get a dedicated segment.
SHARED_REQUEST_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
#: Dedicated segments are multiples of this.
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB
#: A large request takes an oversized block whole only if at most this much is wasted (``max_non_split_rounding_mb``).
NON_SPLIT_ROUNDING_BYTES = 20 * MIB
#: Number of sizes for which ``roundup_power2_divisions`` can differ: 1 MiB, 2 MiB ... 32 GiB and above.
DIVISION_SIZES = 16
#: Assumed device memory; it only determines the address range of an expandable segment.
ASSUMED_DEVICE_BYTES = 80 << 30

#: Choice among free blocks of equal size. ``address``: lowest address, as in torch up to 2.11; ``block``: oldest block
#: record, as in builds of spring 2026 (pytorch pull request 178362); ``segment``: oldest segment, then lowest address,
#: as in later ones (183591).
TieBreak = Literal["address", "block", "segment"]
TIE_BREAKS: tuple[TieBreak, ...] = ("address", "block", "segment")


@dataclass(frozen=True)
class Settings:
    """Options of ``PYTORCH_ALLOC_CONF``, and limits of the device.

    Attributes:
        expandable_segments: Grow segments in place instead of reserving new ones.
        max_split_size_bytes: Blocks above this size are not split; None for no limit.
        divisions: Steps between powers of two to which sizes are rounded up, one number for each of the
            ``DIVISION_SIZES`` sizes; 0 and 1 mean the usual 512 bytes.
        garbage_collection_threshold: Share of ``limit_bytes`` above which old free segments are released; 0 for never.
            No effect without a limit, as in torch.
        limit_bytes: Maximum reserved bytes of this process (``set_per_process_memory_fraction``); None if not set.
        capacity_bytes: Device memory available to the allocator; None for unlimited.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    divisions: tuple[int, ...] = (0,) * DIVISION_SIZES
    garbage_collection_threshold: float = 0.0
    limit_bytes: int | None = None
    capacity_bytes: int | None = None


def rounded_request(size: int, divisions: tuple[int, ...] = ()) -> int:
    """Returns the size of the block that serves a request.

    Args:
        size: Bytes requested, above 0.
        divisions: As in ``Settings``.
    """
    if size < ROUNDING_BYTES:
        return ROUNDING_BYTES
    if divisions:
        steps = divisions[min(max(size.bit_length() - 1 - 20, 0), DIVISION_SIZES - 1)]
        if steps > 1 and size > ROUNDING_BYTES * steps:
            return _next_division(size, steps)
    return -(-size // ROUNDING_BYTES) * ROUNDING_BYTES


def segment_size(rounded: int) -> int:
    """Returns the size of a new segment for a rounded request that no free block can serve."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < SHARED_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // OWN_SEGMENT_ROUNDING_BYTES) * OWN_SEGMENT_ROUNDING_BYTES


def _next_division(size: int, steps: int) -> int:
    """Rounds up to the next step between two powers of two; powers of two are unchanged."""
    if size & (size - 1) == 0:
        return size
    below = 1 << (size.bit_length() - 1)
    step = below >> (steps.bit_length() - 1)
    return below << 1 if step == 0 else -(-size // step) * step


def settings_from_options(options: Mapping[str, str], *, capacity_bytes: int | None = None) -> Settings:
    """Parses the options of ``PYTORCH_ALLOC_CONF`` that the model supports; others do not affect blocks.

    Args:
        options: Values by key, as text.
        capacity_bytes: Device memory; None for unlimited.

    Raises:
        ValueError: A value is invalid in torch.
    """
    split = options.get("max_split_size_mb")
    return Settings(
        expandable_segments=options.get("expandable_segments", "False").lower() in ("true", ""),
        max_split_size_bytes=int(split) * MIB if split and int(split) > 0 else None,
        divisions=_divisions(options.get("roundup_power2_divisions", "0")),
        garbage_collection_threshold=float(options.get("garbage_collection_threshold") or 0.0),
        capacity_bytes=capacity_bytes,
    )


def _divisions(text: str) -> tuple[int, ...]:
    """Parses ``4`` for every size, or ``[256:1,512:2,>:4]`` with one entry per size in MiB.

    The first also applies to smaller sizes, ``>`` to those above the last.
    """
    if not text.startswith("["):
        return (int(text or 0),) * DIVISION_SIZES
    divisions = [0] * DIVISION_SIZES
    last = -1
    for part in text.strip("[]").split(","):
        bound, _, value = part.strip().partition(":")
        if bound.strip() == ">":
            divisions[last + 1 :] = [int(value)] * (DIVISION_SIZES - last - 1)
            continue
        place = min(int(bound).bit_length() - 1, DIVISION_SIZES - 1)
        if last < 0:
            divisions[:place] = [int(value)] * place
        divisions[place] = int(value)
        last = place
    return tuple(divisions)
