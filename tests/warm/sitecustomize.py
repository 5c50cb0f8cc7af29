"""Runs first in Python processes that tests start, and hands those that run a job to a process that has torch already.

It lies first on ``PYTHONPATH`` while tests run (tests/warm/client.py). What it cannot hand over goes on as it is.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _hand_over() -> None:
    if not os.environ.get("WARM_PYTHON"):
        return
    sys.path.insert(0, HERE)
    try:
        from relay import is_job, run_elsewhere
    finally:
        sys.path.remove(HERE)
    if is_job(sys.orig_argv[1:], os.environ):
        run_elsewhere(os.environ["WARM_PYTHON"])


sys.path[:] = [entry for entry in sys.path if entry != HERE]
sys.path_importer_cache.pop(HERE, None)
_hand_over()

# Now the import that Python would have made without this file.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
