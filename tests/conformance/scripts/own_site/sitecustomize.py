import os
import sys

started = True
is_memprof = "memprof.cli.main" in sys.orig_argv  # a Python process too, but not the one under test
if not is_memprof:
    print("own sitecustomize", __name__, __file__, os.path.basename(sys.path[0]))
if os.environ.get("BREAK_SITE") and not is_memprof:
    raise RuntimeError("own sitecustomize is broken")
