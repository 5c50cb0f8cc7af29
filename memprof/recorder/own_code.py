"""Where the code of memprof is that stands between a job and torch."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
#: Folders whose frames belong to no one who reads a stack: the recorder's, and the virtual machine's above it.
OWN_CODE = tuple(str(_PACKAGE / name) for name in ("recorder", "virtual"))
