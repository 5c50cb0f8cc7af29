"""Loads a pickle of plain containers without ever executing its content."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

from memprof.trace.importers.old_pickles import check_old_opcodes, looks_old
from memprof.trace.importers.pickle_opcodes import RefusedError, check_end, check_opcodes

__all__ = ["RefusedError", "load_plain"]

#: Bytes read ahead for the unpickler.
_AHEAD = 1 << 17

#: Exceptions raised for a pickle whose opcodes are allowed, but in an invalid order.
_NONSENSE = (
    pickle.UnpicklingError,
    EOFError,
    TypeError,
    ValueError,  # includes a text that is not UTF-8
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def load_plain(data: bytes, on_progress: Callable[[float], None] = lambda share: None) -> Any:
    """Loads a pickle of dicts, lists, tuples, texts, numbers, booleans and None.

    Opcodes are checked before anything is loaded; the unpickler then resolves no classes.

    Args:
        data: The pickle, protocol 0 to 5.
        on_progress: Called from time to time with the share checked.

    Raises:
        RefusedError: It holds anything else; the reason names what.
    """
    try:
        if looks_old(data):
            check_end(data, check_old_opcodes(data))
        else:
            check_opcodes(data, on_progress)
    except RefusedError as refusal:
        raise _named(data, refusal) if refusal.has_name else refusal from None
    return _load(data)


def _load(data: bytes) -> Any:
    try:
        return _PlainUnpickler(_Bytes(data)).load()
    except MemoryError:
        raise RefusedError("not enough memory to load it") from None
    except _NONSENSE as error:
        detail = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise RefusedError(f"its opcodes are in an invalid order ({detail})") from error


class _Bytes(io.BytesIO):
    """Bytes as the unpickler reads them: a frame's claimed size beyond their end is never allocated."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def peek(self, size: int) -> bytes:
        """Returns the next bytes: without frames, before protocol 4, the unpickler would request each byte singly."""
        position = self.tell()
        return self._data[position : position + max(size, _AHEAD)]


class _NameRefusedError(Exception):
    """The name that a pickle requests to import."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves no class and no persistent object."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Rejects every name."""
        raise _NameRefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Rejects every persistent id."""
        raise _NameRefusedError(f"persistent id {pid!r}")


def _named(data: bytes, refusal: RefusedError) -> RefusedError:
    """Reads the name that is requested.

    Everything before it has passed the check; the unpickler stops at the name, which is never looked up.
    """
    position = refusal.position
    opcode = refusal.reason.split(" opcode ", 1)[1].split(",", 1)[0]
    if opcode.startswith("EXT"):
        width = int(opcode[3:])
        code = int.from_bytes(data[position + 1 : position + 1 + width], "little")
        known = copyreg._inverted_registry.get(code)  # type: ignore[attr-defined]  # the registry has no other door
        name = ".".join(known) if known else f"extension {code}"
        return RefusedError(f"it imports {_shown(name)} (opcode {opcode})", position)
    try:
        # Up to the end of its line: GLOBAL and INST spread the name over two lines.
        _PlainUnpickler(_Bytes(data[: position + 1000])).load()
    except _NameRefusedError as name_error:
        return RefusedError(f"it imports {_shown(str(name_error))} (opcode {opcode})", position)
    except _NONSENSE:
        return refusal  # the name is cut short, or is not text
    return refusal


def _shown(name: str) -> str:
    text = name if len(name) <= 100 else f"{name[:97]}..."
    return text if text.isprintable() else ascii(text)
