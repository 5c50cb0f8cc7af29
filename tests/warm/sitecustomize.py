"""Runs first in Python processes that tests start, and passes some to a process that has imported what they need.

It lies first on ``PYTHONPATH`` while tests run (tests/warm/client.py). Others run normally.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _hand_over() -> None:
    if not os.environ.get("WARM_PYTHON") or os.environ.get("WARM_PREFIX") != sys.prefix:
        return
    sys.path.insert(0, HERE)
    try:
        from relay import kind_of, run_elsewhere
    finally:
        sys.path.remove(HERE)
    if kind := kind_of(sys.orig_argv[1:], os.environ):
        run_elsewhere(f"{os.environ['WARM_PYTHON']}-{kind}")


sys.path[:] = [entry for entry in sys.path if entry != HERE]
sys.path_importer_cache.pop(HERE, None)
_hand_over()

# Now the import that Python would have made without this file.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
