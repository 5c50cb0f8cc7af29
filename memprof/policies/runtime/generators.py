"""Saves random generator states before an operator draws numbers, and restores them for its second run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def states_for(kwargs: dict[str, Any] | None, device: torch.device) -> tuple[tuple[torch.Generator, bytes], ...]:
    """Returns the states of the generators that an operator may draw from.

    Args:
        kwargs: Its keyword arguments; a generator among them is the only one.
        device: The device it runs on.
    """
    own = (kwargs or {}).get("generator")
    generators = [own if own is not None else torch.default_generator]
    if own is None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return tuple((generator, _state_of(generator)) for generator in generators)


@contextmanager
def restored(states: tuple[tuple[torch.Generator, bytes], ...] | None) -> Iterator[None]:
    """Restores states temporarily, then the previous ones."""
    if states is None:
        yield
        return
    before = [(generator, _state_of(generator)) for generator, _ in states]
    try:
        put_back(states)
        yield
    finally:
        put_back(before)


def put_back(states: Iterable[tuple[torch.Generator, bytes]] | None) -> None:
    """Restores states permanently."""
    with torch._C._DisableTorchDispatch():
        for generator, state in states or ():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _state_of(generator: torch.Generator) -> bytes:
    """Returns a state as bytes, outside device memory."""
    with torch._C._DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()
