"""Imports for memprof alone inside a job, which may compare what is in ``sys.modules`` with what it has imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_hidden(name: str) -> Any:
    """Imports a module; one that the job has not imported leaves no trace in ``sys.modules`` or in its package.

    Modules that it imports in turn stay hidden as well. A job that imports one of them later runs it anew.

    Raises:
        ImportError: There is no such module.
    """
    if name in sys.modules:
        return sys.modules[name]
    before = set(sys.modules)
    try:
        return importlib.import_module(name)
    finally:
        for fresh in [each for each in list(sys.modules) if each not in before]:
            module = sys.modules.pop(fresh)
            package, _, own = fresh.rpartition(".")
            if package in sys.modules and vars(sys.modules[package]).get(own) is module:
                delattr(sys.modules[package], own)
