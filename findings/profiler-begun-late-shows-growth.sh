#!/usr/bin/env bash
# torch 2.13.0: a torch.profiler window that begins in mid-run shows a steady job as growing. The CPU allocator reports
# no free of a block that is older than the window (it only prints a warning), and "Total Allocated" begins at 0: a loop
# that replaces one 4 MiB tensor by another has 4 MiB more at the end of the trace, and no event tells it from a leak.
# Seen on 2026-11-28.
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

held = torch.zeros(1024, 1024)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    del held
    held = torch.zeros(1024, 1024)
profiler.export_chrome_trace("trace.json")
with open("trace.json") as file:
    events = [event["args"] for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
print([(event["Bytes"], event["Total Allocated"]) for event in events])
PY
venv/bin/python job.py 2>errors | tee seen
grep -o "will not include the deallocation event" errors | head -1 >>seen
diff - seen <<'SEEN'
[(4194304, 4194304)]
will not include the deallocation event
SEEN
