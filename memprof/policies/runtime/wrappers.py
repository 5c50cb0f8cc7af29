"""torch modules that wrap a whole model: names and patterns apply to the model inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Types of wrappers, and where they keep the model.
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def unwrapped(model: Any) -> Any:
    """Returns the model inside DistributedDataParallel, DataParallel and torch.compile's OptimizedModule."""
    *_, inside = _layers(model)
    return inside


def is_compiled_as_whole(model: Any) -> bool:
    """Returns whether one of the wrappers around a model is torch.compile's."""
    *wrappers, _ = _layers(model)
    return any(type(wrapper).__name__ == "OptimizedModule" for wrapper in wrappers)


def _layers(model: Any) -> Iterator[Any]:
    """Yields the wrappers around a model, outermost first, and then the model."""
    while type(model).__module__.startswith("torch.") and type(model).__name__ in WRAPPERS:
        yield model
        model = getattr(model, WRAPPERS[type(model).__name__])
    yield model


def without_wrappers(name: str) -> str:
    """Returns a name, or a pattern of names, as the model inside has it."""
    while name.startswith(tuple(f"{place}." for place in WRAPPERS.values())):
        name = name.partition(".")[2]
    return "." if name in WRAPPERS.values() else name
