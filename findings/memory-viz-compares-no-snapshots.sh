#!/usr/bin/env bash
# torch 2.13.0: `python -m torch.cuda._memory_viz compare BEFORE AFTER` raises a TypeError for every two snapshots that
# torch writes, and for lists of segments too: it passes on the whole dictionary, where the function reads segments. The
# function itself compares which segments there are, not what is in them: 1 GiB more in a segment that was there before,
# which is how most memory grows, is no difference. Seen on 2026-11-30, with snapshots written by hand.
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

from torch.cuda._memory_viz import compare, memory


def snapshot(*sizes):
    blocks = [
        {"address": 0, "size": size, "requested_size": size, "state": state, "frames": []}
        for size, state in zip(sizes, ("active_allocated", "inactive"))
    ]
    segment = {"device": 0, "address": 0, "total_size": sum(sizes), "stream": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [[]]}


before, after = snapshot(1 << 20, (1 << 30) - (1 << 20)), snapshot(1 << 30)
for what in (lambda one: one, lambda one: one["segments"]):
    for name, one in (("before", before), ("after", after)):
        with open(name, "wb") as file:
            pickle.dump(what(one), file)
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "compare", "before", "after"]
    print(subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr.splitlines()[-1])
for name, one in (("before", before), ("after", after)):
    print(f"{name}:", memory(one, format_flamegraph=str.split)[1], "bytes in use")
print("difference:", repr(compare(before["segments"], after["segments"], format_flamegraph=str)))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
TypeError: string indices must be integers, not 'str'
TypeError: string indices must be integers, not 'str'
before: 1048576 bytes in use
after: 1073741824 bytes in use
only_before = []
only_after = []
difference: ''
SEEN
