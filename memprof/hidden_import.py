"""Imports private to memprof inside a job, which may inspect ``sys.modules``."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_hidden(name: str, *parts: str) -> Any:
    """Imports a module; if the job has not imported it, it stays out of ``sys.modules`` and its package.

    A later import by the job gets its own copy.

    Args:
        name: The module.
        parts: Modules it imports that must stay hidden too. They are listed, since any other new module may belong to
            another thread.

    Raises:
        ImportError: The module does not exist.
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
