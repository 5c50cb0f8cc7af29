"""Sets options of the CUDA caching allocator in the environment of the job."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy

#: The variable torch 2.9 and newer read on every device, and the older one. Torch 2.11 to 2.13 read the old name first
#: (c10/cuda/CUDAAllocatorConfig.h), so setting only the new one has no effect where the old one is set.
VARIABLE = "PYTORCH_ALLOC_CONF"
OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"

#: The options, and how their values are read.
_READ: dict[str, Callable[[str], bool | int | float]] = {
    "expandable_segments": lambda text: {"true": True, "false": False, "": True}[text.lower()],
    "max_split_size_mb": int,
    "roundup_power2_divisions": int,
    "garbage_collection_threshold": float,
    "pinned_max_round_threshold_mb": int,
    "pinned_max_cached_size_mb": int,
}
#: Which values are valid, as torch decides when the job starts, and how they are called. Blocks of up to 20 MiB are
#: always split: torch rejects a lower limit.
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "expandable_segments": (lambda value: type(value) is bool, "true or false"),
    "max_split_size_mb": (
        lambda value: type(value) is int and (not value or value > 20),
        "a whole number of MiB above 20, or 0 for the default",
    ),
    "roundup_power2_divisions": (
        lambda value: type(value) is int and value >= 0 and not value & (value - 1),
        "a power of two such as 4, or 0 for the default",
    ),
    "garbage_collection_threshold": (
        lambda value: type(value) in (int, float) and 0 <= value < 1,
        "a share of the device's memory above 0 and below 1, or 0 for the default",
    ),
    **dict.fromkeys(
        ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
        (lambda value: type(value) is int and value >= 0, "a whole number of MiB, or 0 for the default"),
    ),
}


@dataclass(frozen=True)
class Allocator(Policy):
    """Sets options of the CUDA caching allocator in the environment of the job.

    They change reserved bytes and fragmentation; ``roundup_power2_divisions`` and ``expandable_segments`` also change
    allocated bytes. All are replayed through the model of the caching allocator. They have no effect on devices other
    than CUDA.

    Attributes:
        expandable_segments: Grow segments in place instead of allocating new ones.
        max_split_size_mb: Do not split larger blocks, in MiB above 20; 0 keeps torch's default.
        roundup_power2_divisions: Round sizes up to this many steps between powers of two, itself a power of two; 0
            keeps the default.
        garbage_collection_threshold: Free cached blocks above this fraction of the process's memory limit, between 0
            and 1; 0 keeps the default. Effective only where ``set_per_process_memory_fraction`` set a limit.
        pinned_max_round_threshold_mb: Do not round larger requests of pinned host memory up to a power of two, in MiB;
            0 rounds all.
        pinned_max_cached_size_mb: Return larger blocks of pinned memory to the system when they are freed, and do not
            round them, in MiB; 0 caches all.
    """

    name: ClassVar[str] = "allocator"
    live_refusal: ClassVar[str] = "the allocator reads its options when the process starts"
    set_in_framework: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("hf", "lightning"), f"{live_refusal}. Set PYTORCH_CUDA_ALLOC_CONF."
    )
    flag_help: ClassVar[str] = "Set options of the CUDA caching allocator, in the syntax of PYTORCH_ALLOC_CONF."
    flag_example: ClassVar[str] = "expandable_segments"
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "replayed"
    changes_forward: ClassVar[bool] = False
    why_not_torch: ClassVar[str] = ""

    expandable_segments: bool = False
    max_split_size_mb: int = 0
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0
    pinned_max_round_threshold_mb: int = 0
    pinned_max_cached_size_mb: int = 0

    def __post_init__(self) -> None:
        """Validates the settings as torch would when the job starts."""
        for key, (is_valid, words) in _VALID.items():
            value = getattr(self, key)
            if not is_valid(value):
                raise PolicyError(f"allocator: {key} must be {words}, not {value!r}.")
        if not self.options():
            raise PolicyError("allocator: no option set; write one, such as expandable_segments = true.")

    @property
    def splits_all_blocks(self) -> bool:
        """With expandable segments, whose blocks are split to 512 bytes."""
        return self.expandable_segments

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Parses ``--allocator expandable_segments`` or ``--allocator max_split_size_mb:128,...``, as torch does.

        Raises:
            PolicyError: An option is unknown or its value is invalid.
        """
        settings: dict[str, bool | int | float] = {}
        for key, value in parse_options(text).items():
            if key not in _READ:
                raise PolicyError(
                    f"--allocator: unknown option {key!r}; write expandable_segments, max_split_size_mb:128, "
                    "roundup_power2_divisions:4, garbage_collection_threshold:0.8, "
                    "pinned_max_round_threshold_mb:128 or pinned_max_cached_size_mb:128."
                )
            try:
                settings[key] = _READ[key](value)
            except (KeyError, ValueError):
                raise PolicyError(f"--allocator: invalid {key} {value!r}.") from None
        return cls(**settings)  # type: ignore[arg-type]  # each value was parsed with its key's own type

    @property
    def caveat(self) -> str:
        """What torch 2.13 does to blocks that it keeps without rounding them: it looks at their power of two alone."""
        kept = self.pinned_max_cached_size_mb
        if not self.pinned_max_round_threshold_mb or 0 < kept <= self.pinned_max_round_threshold_mb:
            return ""
        return (
            "torch 2.13 may serve a pinned request from a freed block that is too small where sizes are not rounded; "
            f"set pinned_max_cached_size_mb:{self.pinned_max_round_threshold_mb} instead"
        )

    def options(self) -> dict[str, str]:
        """Returns the options that are set, in torch's names and syntax."""
        return {key: str(getattr(self, key)) for key in _READ if getattr(self, key)}

    def environment(self) -> dict[str, str]:
        """Returns the variables of this process's environment with the options added.

        An option of the policy overrides the user's value, since the plan was predicted with it; the user's other
        options stay.
        """
        return merged_environment(self.options(), os.environ)

    def describe(self) -> str:
        """Returns the options that are set: ``allocator expandable_segments``."""
        chosen = ", ".join(key if value == "True" else f"{key} {value}" for key, value in self.options().items())
        return f"allocator {chosen}"


def merged_environment(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Adds options to those of an environment.

    Args:
        options: The options, by name.
        environment: The environment; torch prefers the old variable where both are set.

    Returns:
        The variables to set: the new one, and the old one where it would override it.
    """
    merged = {**options_in_force(environment), **options}
    text = ",".join(f"{key}:{value}" if value else key for key, value in merged.items())
    return {VARIABLE: text, OLD_VARIABLE: text} if OLD_VARIABLE in environment else {VARIABLE: text}


def options_in_force(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the options torch uses in an environment: the old variable's where it is set."""
    return parse_options(environment.get(OLD_VARIABLE) or environment.get(VARIABLE) or "")


def parse_options(text: str) -> dict[str, str]:
    """Parses ``key:value,key:[1:2,3:4]`` into values by key; a bare key has the value ""."""
    options = {}
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        key, _, value = part.strip().partition(":")
        if key:
            options[key.strip()] = value.strip()
    return options
