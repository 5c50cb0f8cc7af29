#!/usr/bin/env bash
# torch 2.13.0: the memory timeline of torch.profiler sorts memory by what it was computed from. The temporaries of Adam's
# loop (foreach=False, as on the CPU) come out as other things: with a single weight of 4 MiB, parameters rise to 8 MiB in
# each update and activations to 4, of which the model has 32 KiB. With foreach=True or fused=True the parameters are
# right, and the temporaries of foreach=True unknown. Seen on 2026-11-30.
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
PARAMETERS, ACTIVATIONS, UNKNOWN = 1, 5, 8  # columns of the file
for form in ("foreach=False", "foreach=True", "fused=True"):
    model = torch.nn.Linear(1024, 1024, bias=False)
    name, _, value = form.partition("=")
    optimizer = torch.optim.Adam(model.parameters(), **{name: value == "True"})
    batch = torch.randn(8, 1024)
    settings = {"profile_memory": True, "record_shapes": True, "with_stack": True}
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    profiler.export_memory_timeline("timeline.json", device="cpu")
    with open("timeline.json") as file:
        _, rows = json.load(file)
    most = [max(row[column] for row in rows) / MIB for column in (PARAMETERS, ACTIVATIONS, UNKNOWN)]
    print(f"{form}: at most {most[0]:.2f} MiB of parameters, {most[1]:.2f} of activations, {most[2]:.2f} unknown")
PY
venv/bin/python -W ignore job.py 2>errors | tee seen
diff - seen <<'SEEN'
foreach=False: at most 8.00 MiB of parameters, 4.00 of activations, 8.00 unknown
foreach=True: at most 4.00 MiB of parameters, 0.03 of activations, 4.00 unknown
fused=True: at most 4.00 MiB of parameters, 0.03 of activations, 0.00 unknown
SEEN
