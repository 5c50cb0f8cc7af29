"""Of the job alone: memprof's own interpreter runs it, too."""

import sys

if sys.argv[0].startswith("surr"):
    raise SystemExit(3)
