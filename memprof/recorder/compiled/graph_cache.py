"""Has inductor lower every graph of a recorded job: graphs from its cache lack their modules and lines."""

from __future__ import annotations

import os
import sys

_CONFIG = "torch._inductor.config"
#: Inductor's settings by the variables with which the user chooses them.
_CACHES = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "fx_graph_cache",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "fx_graph_remote_cache",
}


class GraphCache:
    """Inductor's caches of lowered graphs. Those of compiled kernels are left alone."""

    def __init__(self) -> None:
        """Changes nothing yet."""
        self._before: dict[str, bool | None] = {}

    def disable(self) -> None:
        """Disables the caches that are on, unless the environment says which to use."""
        config = sys.modules[_CONFIG]
        for variable, name in _CACHES.items():
            before = getattr(config, name, False)
            if variable not in os.environ and before is not False:
                self._before[name] = before
                setattr(config, name, False)

    def restore(self) -> None:
        """Restores the settings that `disable` changed and nobody since."""
        config = sys.modules.get(_CONFIG)
        for name, before in self._before.items():
            if getattr(config, name, None) is False:
                setattr(config, name, before)
        self._before.clear()
