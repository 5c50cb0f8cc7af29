"""Carries storages of a CUDA device to pinned host memory and back, on streams of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class _Place:
    """Pinned memory, and the copies to and from it.

    Attributes:
        host: The memory.
        sender: The stream that computed what was sent, and uses its memory again.
        out: After this the copy out is complete.
        taker: The stream for which memory was taken to copy back into.
        back: After this that copy is complete.
    """

    host: torch.Tensor
    sender: torch.cuda.Stream
    out: torch.cuda.Event
    taker: torch.cuda.Stream | None = None
    back: torch.cuda.Event | None = None


class HostCarrier:
    """Copies out on one stream and back on another, beside the stream that computes.

    Nobody waits on the processor: the computing stream waits for an event where memory is given back or read. So the
    caching allocator may hand out the memory again at once, since whatever is done with it comes after that event.
    The streams are remembered: memory may be given back by whoever drops the last reference, in another stream.

    Attributes:
        device: The device it moves from, such as ``cuda:0``; what lies on another one stays there.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the two streams of a device."""
        self.device = str(device)
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, storage: torch.UntypedStorage) -> _Place:
        """Starts the copy out, after what was computed so far."""
        sender = torch.cuda.current_stream(self._device)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # The job may have set another default device.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._out.wait_stream(sender)
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            out = self._out.record_event()
        return _Place(host, sender, out)

    def sent(self, place: _Place) -> bool:
        """Lets what is computed from here on, in the memory given back too, come after the copy out."""
        place.sender.wait_event(place.out)
        return True

    def fetch(self, place: _Place) -> torch.UntypedStorage:
        """Takes memory of the computing stream and starts the copy back once its last owner is done with it."""
        place.taker = torch.cuda.current_stream(self._device)
        target = torch.empty(place.host.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(place.taker)
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
        place.sender.wait_event(place.out)
        if place.taker is not None and place.back is not None:
            place.taker.wait_event(place.back)

    def close(self) -> None:
        """Waits until nothing is under way."""
        self._out.synchronize()
        self._back.synchronize()
