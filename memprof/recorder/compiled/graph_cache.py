"""Has inductor lower every graph of a recorded job: graphs from its cache lack their modules and lines."""

from __future__ import annotations

import os
import sys
from uuid import uuid4

_CONFIG, _TAG = "torch.compiler.config", "cache_key_tag"
#: Variables with which the user chooses whether graphs are cached.
_VARIABLES = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE")


class GraphCache:
    """Inductor's caches of lowered graphs, of which none is found while they are set aside.

    Graphs are still written, under keys with a tag of their own: a job may save them (``save_cache_artifacts``). Caches
    of compiled kernels are left alone.
    """

    def __init__(self) -> None:
        """Changes nothing yet."""
        self._before: str | None = None
        self._tag = ""

    def set_aside(self) -> None:
        """Gives graphs new keys, unless the environment says which caches to use."""
        before = getattr(sys.modules.get(_CONFIG), _TAG, None)
        if before is not None and not any(variable in os.environ for variable in _VARIABLES):
            self._before = before
            self._change()

    def renew(self) -> None:
        """Gives the next graph another key, so that one equal to an earlier one is lowered too."""
        if self._is_set():
            self._change()

    def restore(self) -> None:
        """Restores the tag, unless the job has set another since."""
        if self._is_set():
            setattr(sys.modules[_CONFIG], _TAG, self._before)
        self._before = None

    def _change(self) -> None:
        self._tag = f"{self._before}memprof-{uuid4().hex}"
        setattr(sys.modules[_CONFIG], _TAG, self._tag)

    def _is_set(self) -> bool:
        return self._before is not None and getattr(sys.modules.get(_CONFIG), _TAG, None) == self._tag
