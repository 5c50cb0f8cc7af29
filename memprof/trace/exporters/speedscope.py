"""Writes profiles of bytes by stack for speedscope.app.

Source: speedscope's file format, ``https://www.speedscope.app/file-format-schema.json``: sampled profiles, whose
samples are stacks of frames, outermost first, each with a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.trace.exporters.texts import whole_text

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True, order=True)
class Frame:
    """One frame of a stack.

    Attributes:
        name: Display name.
        file: Source file, "" where there is none.
        line: Line number, 0 where unknown.
    """

    name: str
    file: str = ""
    line: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the frame as a speedscope JSON object."""
        place = {"file": whole_text(self.file)} if self.file else {}
        return {"name": whole_text(self.name), **place, **({"line": self.line} if self.line else {})}


#: Bytes by stack, outermost frame first.
Profile = Mapping[tuple[Frame, ...], int]


def speedscope_bytes(title: str, profiles: Mapping[str, Profile], made_by: str) -> bytes:
    """Writes named profiles of bytes; the first one is shown first.

    Args:
        title: Title of the whole file.
        profiles: The profiles by name.
        made_by: Exporter recorded in the file.
    """
    frames: dict[Frame, int] = {}
    written = [_profile(name, profile, frames) for name, profile in profiles.items()]
    content = {
        "$schema": SCHEMA,
        "name": whole_text(title),
        "exporter": made_by,
        "activeProfileIndex": 0,
        "shared": {"frames": [frame.to_json() for frame in frames]},
        "profiles": written,
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _profile(name: str, profile: Profile, frames: dict[Frame, int]) -> dict[str, Any]:
    stacks: Sequence[tuple[Frame, ...]] = sorted(profile)  # equal prefixes are adjacent
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(profile.values()),
        "samples": [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks],
        "weights": [profile[stack] for stack in stacks],
    }
