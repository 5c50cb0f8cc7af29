#!/usr/bin/env bash
# torch 2.13.0: `python -m torch.cuda._memory_viz trace` ends with "TOTAL MEM", which is no total: it is the number of
# events before the last one, plus the bytes of the last one if it allocates, and less them if it frees. Its loop over
# the events counts them in the variable in which it adds bytes. Three allocations of 1 GiB come to 1 GiB, and after
# one of 512 bytes more they come to 515. Seen on 2026-11-30, with snapshots written by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import pickle
import subprocess
import sys


def total(sizes):
    events = [
        {"action": "alloc", "addr": place << 30, "size": size, "stream": 0, "frames": []}
        for place, size in enumerate(sizes)
    ]
    with open("snapshot.pickle", "wb") as file:
        pickle.dump({"segments": [], "device_traces": [events]}, file)
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace", "snapshot.pickle"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


print("three of 1 GiB:", total([1 << 30] * 3))
print("and one of 512 B:", total([1 << 30] * 3 + [512]))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
three of 1 GiB: TOTAL MEM: 1.0GiB
and one of 512 B: TOTAL MEM: 515.0B
SEEN
