"""memprof: what fills the GPU memory of a PyTorch training job, and which plan makes it fit.

In a script::

    import memprof

    with memprof.record("run.memprof", steps=3) as recorder:
        train()

or, to train under a plan::

    memprof.apply("plan.toml", model, optimizer)

or, to find the plan while it trains::

    memprof.make_fit(model, optimizer, budget="8GiB")

`memprof.phase` names a part of the job, such as a rollout, in recordings.

From the command line: ``memprof record train.py``, then ``memprof report``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.version import __version__

if TYPE_CHECKING:
    from memprof.launch.apply import apply
    from memprof.launch.inline import record
    from memprof.launch.live.make_fit import make_fit
    from memprof.phases import phase
    from memprof.planners.find import find_plan
    from memprof.planners.graph.arrays import step_from_arrays
    from memprof.policies.accumulate.split import micro_batches
    from memprof.policies.plan.plan_file import parse_plan

__all__ = [
    "__version__",
    "apply",
    "find_plan",
    "make_fit",
    "micro_batches",
    "parse_plan",
    "phase",
    "record",
    "step_from_arrays",
]

#: Public names that are imported on first use, and their modules.
_LAZY = {
    "apply": "memprof.launch.apply",
    "find_plan": "memprof.planners.find",
    "make_fit": "memprof.launch.live.make_fit",
    "micro_batches": "memprof.policies.accumulate.split",
    "parse_plan": "memprof.policies.plan.plan_file",
    "phase": "memprof.phases",
    "record": "memprof.launch.inline",
    "step_from_arrays": "memprof.planners.graph.arrays",
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that ``import memprof`` stays light and does not need torch."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Registers the ``%%memprof`` magic in a notebook: ``%load_ext memprof``."""
    from memprof.integrations.notebook import register

    register(shell)


def __dir__() -> list[str]:
    """Lists the public names, lazily imported ones included."""
    return sorted({*globals(), *__all__})
