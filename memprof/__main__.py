"""Runs the command line: `python -m memprof`."""

from __future__ import annotations

import sys

from memprof.cli.main import main

sys.exit(main())
