"""``python -m memprof_dashboard run.memprof``: the same as ``memprof dashboard``."""

from __future__ import annotations

import sys

from memprof_dashboard.command import main

if __name__ == "__main__":
    sys.exit(main())
