#!/usr/bin/env bash
# numpy 2.4.6 (OpenBLAS in its wheel): `import numpy` starts a thread for each further core, so that a check for one
# thread before os.fork() always fails on a machine with several. OpenBLAS ends them before a fork, also in the process
# that forks, and starts them again when it multiplies next. Seen on 2026-11-29 on Linux; needs two cores or more.
set -euo pipefail
[ "$(nproc)" -ge 2 ] || { echo "this needs two cores" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check numpy==2.4.6
cat >job.py <<'PY'
import os


def threads():
    return len(os.listdir("/proc/self/task"))


import numpy as np

print(threads(), "threads after the import")
if not (pid := os.fork()):
    os._exit(0)
os.waitpid(pid, 0)
print(threads(), "after a fork")
np.ones((500, 500)) @ np.ones((500, 500))
print(threads(), "after a product")
PY
OPENBLAS_NUM_THREADS=2 venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
2 threads after the import
1 after a fork
2 after a product
SEEN
