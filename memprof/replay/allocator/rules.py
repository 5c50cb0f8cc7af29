"""The CUDA caching allocator's sizes: how a request is rounded, and how large a segment is taken for it.

Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

#: Blocks are multiples of this, and start at multiples of it.
ROUNDING_BYTES = 512
#: Requests up to this size, once rounded, are served from small segments.
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
#: Requests below this size share large segments of one size; larger ones get a segment of their own.
SHARED_REQUEST_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
#: Segments of their own are multiples of this.
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB
#: A large request takes an oversized block whole only where this little is wasted (``max_non_split_rounding_mb``).
NON_SPLIT_ROUNDING_BYTES = 20 * MIB
#: Number of sizes for which ``roundup_power2_divisions`` can differ: 1 MiB, 2 MiB ... 32 GiB and above.
DIVISION_SIZES = 16
#: Memory of the device where nobody said: only how many addresses an expandable segment may grow over hangs on it.
ASSUMED_DEVICE_BYTES = 80 << 30

#: Which of several free blocks of one size is taken. ``address``: the lowest, as torch does up to 2.11; ``block``:
#: the one whose record was made first, as builds of spring 2026 do (pytorch pull request 178362); ``segment``: of the
#: segment taken first, the lowest address, as later ones do (183591).
TieBreak = Literal["address", "block", "segment"]
TIE_BREAKS: tuple[TieBreak, ...] = ("address", "block", "segment")


@dataclass(frozen=True)
class Settings:
    """What the allocator is told in ``PYTORCH_ALLOC_CONF`` and what it runs on.

    Attributes:
        expandable_segments: Grow segments in place instead of taking new ones.
        max_split_size_bytes: Larger blocks are not split; None where every block may be.
        divisions: Steps between powers of two that sizes are rounded up to, one number for each of the
            ``DIVISION_SIZES`` sizes; 0 and 1 round to 512 bytes as usual.
        garbage_collection_threshold: Share of ``limit_bytes`` from which on old free segments are given back; 0 for
            never. Without a limit it does nothing, in torch either.
        limit_bytes: What this process may reserve (``set_per_process_memory_fraction``); None where it was not set.
        capacity_bytes: What the device has for the allocator; None for as much as is asked for.
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
        size: Bytes asked for, above 0.
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
    """Returns the size of the segment that is taken for a rounded request where no free block will do."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < SHARED_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // OWN_SEGMENT_ROUNDING_BYTES) * OWN_SEGMENT_ROUNDING_BYTES


def _next_division(size: int, steps: int) -> int:
    """Rounds up to the next of some steps between two powers of two; a power of two stays."""
    if size & (size - 1) == 0:
        return size
    below = 1 << (size.bit_length() - 1)
    step = below >> (steps.bit_length() - 1)
    return below << 1 if step == 0 else -(-size // step) * step


def settings_from_options(
    options: Mapping[str, str], *, capacity_bytes: int | None = None, limit_bytes: int | None = None
) -> Settings:
    """Reads the options of ``PYTORCH_ALLOC_CONF`` that the model knows; others change no block.

    Args:
        options: Values by key, as text.
        capacity_bytes: What the device has; None for as much as is asked for.
        limit_bytes: What the process may reserve; None where it was not limited.

    Raises:
        ValueError: A value is none that torch takes.
    """
    split = options.get("max_split_size_mb")
    return Settings(
        expandable_segments=options.get("expandable_segments", "False").lower() in ("true", ""),
        max_split_size_bytes=int(split) * MIB if split and int(split) > 0 else None,
        divisions=_divisions(options.get("roundup_power2_divisions", "0")),
        garbage_collection_threshold=float(options.get("garbage_collection_threshold") or 0.0),
        limit_bytes=limit_bytes,
        capacity_bytes=capacity_bytes,
    )


def _divisions(text: str) -> tuple[int, ...]:
    """Reads ``4`` for every size, or ``[256:1,512:2,>:4]``: sizes in MiB, each by itself.

    The first holds for smaller ones too, ``>`` for those above the last.
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
