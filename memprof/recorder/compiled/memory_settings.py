"""The settings of torch's compiler that decide how much memory compiled code takes, where the job changes them."""

from __future__ import annotations

import sys

from memprof.trace.files.spool import COMPILED

_TRACING, _INDUCTOR = "torch._functorch.config", "torch._inductor.config"
#: GiB that inductor allocates in the pool of CUDA graphs when it makes the pool; from torch 2.15 on.
INITIAL_POOL = "triton.cudagraph_initial_mempool_allocation_gb"
#: The settings, each with torch's default; a version of torch without one has no such effect. Gates of fusion limit by
#: how much fused kernels may raise a graph's peak (torch 2.15), those of combined kernels the same (2.13).
_SETTINGS = {
    (_TRACING, "activation_memory_budget"): 1.0,
    (_TRACING, "activation_memory_budget_require_full_coverage"): True,
    (_TRACING, "activation_memory_budget_solver"): "dp",
    (_INDUCTOR, "reorder_for_peak_memory"): True,
    (_INDUCTOR, "fusion_memory_timeline_peak_memory_increase_gb"): None,
    (_INDUCTOR, "fusion_memory_timeline_peak_memory_pct_threshold"): None,
    (_INDUCTOR, "combo_kernel_peak_memory_increase_gb"): None,
    (_INDUCTOR, "combo_kernel_peak_memory_pct_threshold"): 0.05,
    (_INDUCTOR, INITIAL_POOL): None,
}


class MemorySettings:
    """The settings that graphs were compiled under, of those that change what they take."""

    def __init__(self) -> None:
        """Starts with none."""
        self._changed: dict[str, None] = {}

    def read(self) -> None:
        """Reads the settings that hold now: while a graph is compiled, those that it is compiled under."""
        for (module, name), usual in _SETTINGS.items():
            found = compiler_setting(module, name, usual)
            if found != usual:
                self._changed[f"{name}={found if isinstance(found, str | float | int | None) else 'its own'}"] = None

    def sentences(self) -> list[str]:
        """Returns a note that lists the changed settings; none where all are torch's defaults."""
        return [f"{COMPILED}: compiled with {', '.join(self._changed)}"] if self._changed else []


def compiler_setting(module: str, name: str, missing: object = None) -> object:
    """Returns a setting of torch's compiler.

    Args:
        module: The module of settings.
        name: The setting, with a dot where it is one of a group.
        missing: Returned where the module is not imported, or this torch lacks the setting.
    """
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, _MISSING)
    return missing if found is _MISSING else found


_MISSING = object()
