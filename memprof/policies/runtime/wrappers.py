"""torch modules that wrap a whole model: names and patterns apply to the model inside."""

from __future__ import annotations

from typing import Any

#: Types of wrappers, and where they keep the model.
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def unwrapped(model: Any) -> Any:
    """Returns the model inside DistributedDataParallel, DataParallel and torch.compile's OptimizedModule."""
    while type(model).__module__.startswith("torch.") and type(model).__name__ in WRAPPERS:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


def is_compiled_as_whole(model: Any) -> bool:
    """Returns whether one of the wrappers around a model is torch.compile's."""
    while unwrapped(model) is not model:
        if type(model).__name__ == "OptimizedModule":
            return True
        model = getattr(model, WRAPPERS[type(model).__name__])
    return False


def without_wrappers(name: str) -> str:
    """Returns a name, or a pattern of names, as the model inside has it."""
    while name.startswith(tuple(f"{place}." for place in WRAPPERS.values())):
        name = name.partition(".")[2]
    return "." if name in WRAPPERS.values() else name
