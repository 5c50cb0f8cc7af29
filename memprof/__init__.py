"""memprof: what fills the memory of a PyTorch training job, and what would make it fit.

In a script::

    import memprof

    with memprof.record("run.memprof", steps=3) as recorder:
        train()

From the command line: ``memprof record train.py``, then ``memprof report``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.launch.inline import record

__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    """Imports `record` at its first use, so that ``import memprof`` stays light and needs no torch."""
    if name == "record":
        from memprof.launch.inline import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, the lazily imported one included."""
    return sorted({*globals(), *__all__})
