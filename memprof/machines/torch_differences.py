"""What is known of how much memory other versions of torch take on a card: one table, and ranges from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.machines.architectures import LT_WORKSPACE_BYTES, Architecture

Version = tuple[int, int]
#: The versions that a range is given for: where a project does not say which, those from 2.0 on.
VERSIONS: tuple[Version, ...] = (*((1, minor) for minor in range(8, 14)), *((2, minor) for minor in range(16)))


@dataclass(frozen=True)
class Difference:
    """What some versions take beyond the newest.

    Attributes:
        since: The first version.
        before: The first version that does not any more.
        handle_bytes: Fewest and most bytes for each handle of cuBLAS that a job has.
        share: Fewest and most of the allocated bytes.
        reserved_share: Fewest and most of the reserved bytes, beyond what is allocated.
    """

    since: Version
    before: Version
    handle_bytes: tuple[int, int] = (0, 0)
    share: tuple[float, float] = (0.0, 0.0)
    reserved_share: tuple[float, float] = (0.0, 0.0)


def differences(architecture: Architecture) -> tuple[Difference, ...]:
    """Returns what is known from recordings of real cards (docs/how-true.md), to the byte where it is workspaces."""
    less = architecture.older_workspace_bytes - architecture.cublas_workspace_bytes
    return (
        Difference((2, 9), (2, 12), handle_bytes=(0, LT_WORKSPACE_BYTES)),  # kept by cuBLASLt (pull request 156495)
        Difference((1, 0), (2, 9), handle_bytes=(0, LT_WORKSPACE_BYTES)),  # allocated for each call
        Difference((1, 0), (2, 12), handle_bytes=(less, less), reserved_share=(-0.01, 0.01)),
        Difference((1, 0), (2, 0), share=(-0.03, 0.2)),  # three TimeSformers and SlowFasts of torch 1.x
    )


def change_between(
    architecture: Architecture, assumed: Version, other: Version, handles: int, allocated: int, reserved: int
) -> tuple[int, int, int, int]:
    """Returns the fewest and the most bytes that another version allocates beyond one, and reserves.

    Args:
        architecture: Torch's behaviour on the card.
        assumed: The version whose bytes are known.
        other: The other one.
        handles: Handles of cuBLAS.
        allocated: Allocated bytes under the known one.
        reserved: Reserved bytes under it.
    """
    least = most = 0.0
    apart = [0.0, 0.0]
    for one in differences(architecture):
        sign = (one.since <= other < one.before) - (one.since <= assumed < one.before)
        both = zip(one.handle_bytes, one.share, strict=True)
        ends = sorted(sign * (handles * size + allocated * share) for size, share in both)
        least, most = least + ends[0], most + ends[1]
        apart = [each + abs(sign) * reserved * share for each, share in zip(apart, one.reserved_share, strict=True)]
    return round(least), round(most), round(least + apart[0]), round(most + apart[1])


def versions_of(requirement: str) -> tuple[Version, ...]:
    """Returns the versions that a requirement such as ``torch>=2.0,<2.5`` allows; those from 2.0 on for "" ."""
    signs = re.findall(r"(===?|[<>~!]=|[<>=^~])\s*v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", requirement)
    if not signs:
        return tuple(each for each in VERSIONS if each >= (2, 0))
    return tuple(each for each in VERSIONS if all(_allows(each, *sign) for sign in signs))


def _allows(version: Version, sign: str, major: str, minor: str, patch: str) -> bool:
    bound, is_last = (int(major), int(minor or 0)), bool(patch and int(patch))
    if sign == "^" or (sign in ("=", "==", "===", "~=", "~") and not minor) or (sign == "~=" and not patch):
        return version >= bound and version[0] == bound[0]
    return {
        "<": version < bound or (is_last and version == bound),
        "<=": version <= bound,
        ">": version > bound or (version == bound and bool(minor)),
        ">=": version >= bound,
        "!=": version != bound or bool(patch),
    }.get(sign, version == bound)
