from __future__ import annotations

import sys

from . import __name__ as parent

print(__name__, __file__, __spec__.name, __package__, parent, sys.argv, sys.path[0])
raise LookupError("from a part of a package")
