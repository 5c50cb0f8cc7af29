"""The type of what makes a search request once a job's peak is known."""

from __future__ import annotations

from typing import Any, Protocol

from memprof.machines.budget import Room, no_room
from memprof.planners.search.explore import SearchRequest


class MakeSearchRequest(Protocol):
    """Options of a search, validated before anything is recorded."""

    def __call__(self, recorded_peak_bytes: int, room: Room = no_room, **more: Any) -> SearchRequest:
        """Makes the request.

        Args:
            recorded_peak_bytes: The peak of the recorded step.
            room: Returns what a device's budget leaves free, in bytes; not called where the budget is a size.
            more: Further fields of the request.

        Raises:
            UsageError: The budget is not valid for this recording.
        """
        ...
