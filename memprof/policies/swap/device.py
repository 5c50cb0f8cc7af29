"""Carries storages of a CUDA device to pinned host memory and back, on streams of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class _Place:
    """Pinned memory, and the events after which the copies to and from it are complete."""

    host: torch.Tensor
    out: torch.cuda.Event
    back: torch.cuda.Event | None = None


class HostCarrier:
    """Copies out on one stream and back on another, beside the stream that computes.

    Nobody waits on the processor: the computing stream waits for an event where memory is given back or read. So the
    caching allocator may hand out the memory again at once, since whatever is done with it comes after that event.

    Attributes:
        device: It moves from CUDA devices.
    """

    device = "cuda"

    def __init__(self, device: torch.device) -> None:
        """Makes the two streams of a device."""
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, storage: torch.UntypedStorage) -> _Place:
        """Starts the copy out, after what was computed so far."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            out = self._out.record_event()
        return _Place(host, out)

    def sent(self, place: _Place) -> bool:
        """Lets what is computed from here on, in the memory given back too, come after the copy out."""
        torch.cuda.current_stream(self._device).wait_event(place.out)
        return True

    def fetch(self, place: _Place) -> torch.UntypedStorage:
        """Takes memory of the computing stream and starts the copy back once its last owner is done with it."""
        computing = torch.cuda.current_stream(self._device)
        target = torch.empty(place.host.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(computing)
        self._back.wait_event(place.out)
        with torch.cuda.stream(self._back):
            target.copy_(place.host, non_blocking=True)
            place.back = self._back.record_event()
        return target.untyped_storage()

    def fetched(self, place: _Place) -> None:
        """Lets what is computed from here on come after the copy back."""
        if place.back is not None:
            torch.cuda.current_stream(self._device).wait_event(place.back)

    def forget(self, place: _Place, storage: torch.UntypedStorage | None) -> None:
        """Lets the memory be used again only after the copies; pinned memory has an allocator that waits itself."""
        computing = torch.cuda.current_stream(self._device)
        for event in (place.out, place.back):
            if event is not None:
                computing.wait_event(event)

    def close(self) -> None:
        """Waits until nothing is under way."""
        self._out.synchronize()
        self._back.synchronize()
