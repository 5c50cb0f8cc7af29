"""Imports for memprof alone inside a job, which may compare what is in ``sys.modules`` with what it has imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_hidden(name: str, *parts: str) -> Any:
    """Imports a module; one that the job has not imported leaves no trace in ``sys.modules`` or in its package.

    A job that imports it later has one of its own.

    Args:
        name: The module.
        parts: Modules that it imports in turn and that are to stay hidden, too. They are named, since all that is new
            may be another thread's.

    Raises:
        ImportError: There is no such module.
    """
    if name in sys.modules:
        return sys.modules[name]
    fresh = [each for each in (name, *parts) if each not in sys.modules]
    try:
        return importlib.import_module(name)
    finally:
        for each in fresh:
            module = sys.modules.pop(each, None)
            package, _, own = each.rpartition(".")
            if package in sys.modules and vars(sys.modules[package]).get(own, package) is module:
                delattr(sys.modules[package], own)
