"""What is known of how much memory other versions of torch take on a card: one table, and ranges from it."""

from __future__ import annotations

import re

from memprof.machines.architectures import LT_WORKSPACE_BYTES, Architecture

Version = tuple[int, int]
#: The versions that a range is given for: where a project does not say which, those from 2.0 on.
VERSIONS: tuple[Version, ...] = (*((1, minor) for minor in range(8, 14)), *((2, minor) for minor in range(16)))


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
    less = handles * (architecture.older_workspace_bytes - architecture.cublas_workspace_bytes)
    #: The first version, the first that does not any more, and how many bytes more than the newest it takes: what is
    #: known from recordings of real cards (docs/how-true.md), to the byte where it is workspaces.
    known: tuple[tuple[Version, Version, float, float], ...] = (
        ((2, 9), (2, 12), 0, handles * LT_WORKSPACE_BYTES),  # kept by cuBLASLt (pull request 156495)
        ((1, 0), (2, 9), 0, handles * LT_WORKSPACE_BYTES),  # allocated for each call
        ((1, 0), (2, 12), less, less),
        ((1, 0), (2, 0), -0.03 * allocated, 0.2 * allocated),  # three TimeSformers and SlowFasts of torch 1.x
    )
    least = most = 0.0
    for since, before, *bounds in known:
        sign = (since <= other < before) - (since <= assumed < before)
        ends = sorted(sign * each for each in bounds)
        least, most = least + ends[0], most + ends[1]
    apart = 0.01 * reserved * ((other < (2, 12)) is not (assumed < (2, 12)))
    return round(least), round(most), round(least - apart), round(most + apart)


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
