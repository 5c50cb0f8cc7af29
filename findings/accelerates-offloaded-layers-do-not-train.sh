#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.13.0: a model whose layers are offloaded (cpu_offload, or dispatch_model with "disk",
# as device_map="auto" does where memory is short) takes forward, backward, clipping and optimizer.step() without an
# error, and its offloaded layers do not train: each forward computes with copies, which get the gradients and are
# thrown away. With some layers offloaded the others train, and the loss falls. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cat >job.py <<'PY'
import logging
import tempfile

import torch
from accelerate import cpu_offload, dispatch_model

logging.disable(logging.WARNING)


def train(name, offload):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    offload(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, losses = torch.randn(32, 8), []
    for _ in range(3):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(f"{loss.item():.2f}")
    trained = sum(parameter.grad is not None for parameter in model.parameters())
    print(f"{name}: losses {', '.join(losses)}; {trained} of 4 parameters have a gradient, {len(optimizer.state)} a state")


with tempfile.TemporaryDirectory() as folder:
    train("in memory", lambda model: None)
    train("cpu_offload", lambda model: cpu_offload(model, torch.device("cpu")))
    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    train("last layer on disk", lambda model: dispatch_model(model, places, offload_dir=folder))
PY
venv/bin/python job.py 2>errors | tee seen
diff - seen <<'SEEN'
in memory: losses 6.79, 4.54, 2.80; 4 of 4 parameters have a gradient, 4 a state
cpu_offload: losses 6.79, 6.79, 6.79; 0 of 4 parameters have a gradient, 0 a state
last layer on disk: losses 6.79, 5.14, 4.02; 2 of 4 parameters have a gradient, 2 a state
SEEN
