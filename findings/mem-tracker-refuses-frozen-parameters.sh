#!/usr/bin/env bash
# torch 2.13.0: torch.distributed._tools.mem_tracker.MemTracker cannot follow a model with a frozen parameter, as each
# fine-tuning of adapters has: it hooks every parameter of a module that is called, and torch takes no hook of a tensor
# without a gradient. track_external() still takes the model; its first forward raises. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker


def follow(name, model):
    tracker = MemTracker()
    tracker.track_external(model)
    try:
        with tracker:
            model(torch.zeros(2, 8)).sum().backward()
        print(f"{name}:", tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], "bytes at the peak")
    except RuntimeError as error:
        print(f"{name}:", error)


follow("all trained", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
frozen[0].requires_grad_(False)
follow("first layer frozen", frozen)
with torch.no_grad():
    follow("all frozen, no_grad", nn.Linear(8, 8).requires_grad_(False))
PY
venv/bin/python -W ignore job.py | tee seen
diff - seen <<'SEEN'
all trained: 1288 bytes at the peak
first layer frozen: cannot register a hook on a tensor that doesn't require gradient
all frozen, no_grad: cannot register a hook on a tensor that doesn't require gradient
SEEN
