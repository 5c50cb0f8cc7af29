"""Copies storages of a CUDA device to pinned host memory and back, on separate streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class _Place:
    """Pinned memory, and the copies to and from it.

    Attributes:
        host: The memory.
        sender: The stream that computed the sent data, and will reuse its memory.
        out: Event after which the copy out is complete.
        copying_to: The stream for which memory was allocated to copy back into.
        back: Event after which that copy is complete.
    """

    host: torch.Tensor
    sender: torch.cuda.Stream
    out: torch.cuda.Event
    copying_to: torch.cuda.Stream | None = None
    back: torch.cuda.Event | None = None


class HostCarrier:
    """Copies out on one stream and back on another, concurrent with the computing stream.

    The processor never waits: the computing stream waits for an event before memory is freed or read. The caching
    allocator may therefore reuse the memory at once, since all later work on it follows that event. The streams are
    recorded, because the last reference may be dropped in another stream.

    Attributes:
        device: The device it moves from, such as ``cuda:0``; storages on other devices stay.
    """

    def __init__(self, device: torch.device) -> None:
        """Creates the two streams of a device."""
        self.device = str(device)
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, storage: torch.UntypedStorage) -> _Place:
        """Starts the copy out, after all work enqueued so far."""
        sender = torch.cuda.current_stream(self._device)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # The job may have set a different default device.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._out.wait_stream(sender)
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            out = self._out.record_event()
        return _Place(host, sender, out)

    def sent(self, place: _Place) -> bool:
        """Makes all later work, including on the freed memory, wait for the copy out."""
        place.sender.wait_event(place.out)
        return True

    def fetch(self, place: _Place) -> torch.UntypedStorage:
        """Allocates memory on the computing stream and starts the copy back once its previous owner is done with it."""
        place.copying_to = torch.cuda.current_stream(self._device)
        target = torch.empty(place.host.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(place.copying_to)
        self._back.wait_event(place.out)
        with torch.cuda.stream(self._back):
            target.copy_(place.host, non_blocking=True)
            place.back = self._back.record_event()
        return target.untyped_storage()

    def fetched(self, place: _Place) -> None:
        """Makes all later work wait for the copy back."""
        if place.back is not None:
            torch.cuda.current_stream(self._device).wait_event(place.back)

    def forget(self, place: _Place, storage: torch.UntypedStorage | None) -> None:
        """Makes reuse of the memory wait for the copies; pinned memory's own allocator waits by itself."""
        place.sender.wait_event(place.out)
        if place.copying_to is not None and place.back is not None:
            place.copying_to.wait_event(place.back)

    def close(self) -> None:
        """Waits for all pending copies."""
        self._out.synchronize()
        self._back.synchronize()
