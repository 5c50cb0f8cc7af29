#!/usr/bin/env bash
# CPython 3.11.7's resource module on Linux 6.18, with numpy 2.4.6 to fill memory: the ru_maxrss of a process that
# subprocess or multiprocessing's "spawn" starts is at least the peak of the process that started it, also where that
# was freed long before: the kernel carries the old program's peak over exec. Each small helper, data loader or measured
# job of a trainer that held 512 MiB reports 512 MiB, and so does RUSAGE_CHILDREN of the parent. VmHWM in
# /proc/self/status is the child's own; with "forkserver", whose server is small, ru_maxrss is too. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check numpy==2.4.6
cat >child.py <<'PY'
import resource


def report(name):
    with open("/proc/self/status") as file:
        own = next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
    said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{name}: ru_maxrss {'over' if said >= 512 else 'under'} 512 MiB, VmHWM", "over" if own >= 512 else "under")


if __name__ == "__main__":
    report("subprocess")
PY
cat >job.py <<'PY'
import multiprocessing
import resource
import subprocess
import sys

import numpy as np
from child import report

if __name__ == "__main__":
    subprocess.run([sys.executable, "child.py"], check=True)
    held = np.ones(1 << 26)
    del held
    print("512 MiB were held and freed", flush=True)
    subprocess.run([sys.executable, "child.py"], check=True)
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=report, args=(method,))
        process.start()
        process.join()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print("RUSAGE_CHILDREN:", "over" if peak >> 10 >= 512 else "under", "512 MiB")
PY
venv/bin/python -u job.py | tee seen
diff - seen <<'SEEN'
subprocess: ru_maxrss under 512 MiB, VmHWM under
512 MiB were held and freed
subprocess: ru_maxrss over 512 MiB, VmHWM under
spawn: ru_maxrss over 512 MiB, VmHWM under
forkserver: ru_maxrss under 512 MiB, VmHWM under
RUSAGE_CHILDREN: over 512 MiB
SEEN
