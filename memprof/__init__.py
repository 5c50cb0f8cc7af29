"""memprof: what fills the memory of a PyTorch training job, and what would make it fit.

In a script::

    import memprof

    with memprof.record("run.memprof", steps=3) as recorder:
        train()

or, to train under a plan::

    memprof.apply("plan.toml", model, optimizer)

From the command line: ``memprof record train.py``, then ``memprof report``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.launch.apply import apply
    from memprof.launch.inline import record
    from memprof.policies.accumulate.split import micro_batches

__all__ = ["__version__", "apply", "micro_batches", "record"]

#: Public names that are imported at their first use, and the modules they are in.
_LAZY = {
    "apply": "memprof.launch.apply",
    "micro_batches": "memprof.policies.accumulate.split",
    "record": "memprof.launch.inline",
}


def __getattr__(name: str) -> Any:
    """Imports the others at their first use, so that ``import memprof`` stays light and needs no torch."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, the lazily imported ones included."""
    return sorted({*globals(), *__all__})
