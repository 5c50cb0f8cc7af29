#!/usr/bin/env bash
# torch 2.13.0: in a profiler's trace, the event of a storage in shared memory or of a mapped file (share_memory_,
# torch.load with mmap=True, from_file, safetensors) says "Total Allocated" 0 and "Total Reserved" its own size, with all
# other memory still there; its end says 0 and 0. A curve or a peak drawn from "Total Allocated", as TensorBoard's is,
# falls to 0 at each tensor that goes to another process, and misses it: here 3 MiB at most instead of 6. Only the sum of
# "Bytes" is right. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import json

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    kept = torch.zeros(2 * MIB, dtype=torch.uint8)
    shared = torch.UntypedStorage._new_shared(3 * MIB)
    other = torch.zeros(MIB, dtype=torch.uint8)
    del shared
profiler.export_chrome_trace("trace.json")
with open("trace.json") as file:
    events = [event["args"] for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
held = 0
for event in events:
    held += event["Bytes"]
    said = event["Total Allocated"] // MIB, event["Total Reserved"] // MIB
    print(f"{event['Bytes'] // MIB:+} MiB: held {held // MIB}, allocated {said[0]}, reserved {said[1]}")
PY
venv/bin/python job.py 2>errors | tee seen
diff - seen <<'SEEN'
+2 MiB: held 2, allocated 2, reserved 0
+3 MiB: held 5, allocated 0, reserved 3
+1 MiB: held 6, allocated 3, reserved 0
-3 MiB: held 3, allocated 0, reserved 0
SEEN
