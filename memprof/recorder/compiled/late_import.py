"""Calls a function once a module of a package has been imported, if the job ever imports it."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib.machinery import FileFinder, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class LateImport:
    """Waits for modules of one package without importing it.

    Python keeps one finder for each folder it imports from. That of the package is given another class, which marks
    the specs of the modules waited for: the job's list of finders stays as it is, and no frame is on the stack while
    the modules are executed.
    """

    def __init__(self, folder: Path, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        """Waits for nothing yet.

        Args:
            folder: The package's folder.
            wanted: What to call with each module, by full name; it must not raise.
        """
        self._folder = str(folder)
        self._wanted = wanted
        self._finder: Any = None

    def install(self) -> bool:
        """Calls the functions of modules that are imported already, and waits for the others.

        Returns:
            Whether the package is one that can be waited for: in a folder, and imported by Python's own finder.
        """
        missing = []
        for name, call in self._wanted.items():
            module = sys.modules.get(name)
            if module is None or getattr(module.__spec__, "_initializing", False):
                missing.append(name)
            else:
                call(module)
        if not missing:
            return True
        finder: Any = pkgutil.get_importer(self._folder)
        if type(finder) is not FileFinder:
            return False
        finder.__class__ = _WaitingFinder
        finder.__dict__[_WANTED] = self._wanted
        self._finder = finder
        return True

    def remove(self) -> None:
        """Stops waiting."""
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.__class__ = FileFinder
            finder.__dict__.pop(_WANTED, None)


_WANTED = "__memprof_wanted__"


class _WaitingFinder(FileFinder):
    """A finder that marks the specs of some modules."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        call = self.__dict__.get(_WANTED, {}).get(fullname)
        if call is not None and type(spec) is ModuleSpec:
            spec.__dict__[_WANTED] = call
            spec.__class__ = _WaitingSpec
        return spec


class _WaitingSpec(ModuleSpec):
    """The spec of a module until its import has ended, which the import system marks by clearing ``_initializing``."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            call = self.__dict__.pop(_WANTED, None)
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # both have the same layout
            module = sys.modules.get(self.name)  # missing after a failed import
            if call is not None and module is not None:
                call(module)


_WaitingFinder.__name__ = _WaitingFinder.__qualname__ = FileFinder.__name__
_WaitingSpec.__name__ = _WaitingSpec.__qualname__ = ModuleSpec.__name__
