#!/usr/bin/env bash
# torch 2.13.0, safetensors 0.8.0: storages that torch.load reads cannot be resized, whether it maps the file or reads it
# into memory of torch's own allocator. Code that frees parameters by resize_(0), as FSDP1 and offloaders do, works on a
# model after load_state_dict() and fails on the same model after load_state_dict(assign=True). A deepcopy can be
# resized again. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 packaging==26.3
cat >job.py <<'PY'
import copy

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def says(name, tensor):
    print(name, tensor.untyped_storage().resizable())


layer = torch.nn.Linear(4, 4)
torch.save(layer.state_dict(), "a.pt")
save_file(layer.state_dict(), "a.safetensors")
says("empty", torch.empty(3))
says("torch.tensor", torch.tensor([1.0]))
says("from_numpy", torch.from_numpy(np.ones(3)))
says("frombuffer", torch.frombuffer(bytearray(8), dtype=torch.int8))
says("torch.load", torch.load("a.pt")["weight"])
says("torch.load(mmap=True)", torch.load("a.pt", mmap=True)["weight"])
says("safetensors", load_file("a.safetensors")["weight"])
layer.load_state_dict(torch.load("a.pt"))
says("load_state_dict", layer.weight)
layer.load_state_dict(torch.load("a.pt"), assign=True)
says("load_state_dict(assign=True)", layer.weight)
says("deepcopy of that", copy.deepcopy(layer).weight)
try:
    layer.weight.untyped_storage().resize_(0)
except RuntimeError as error:
    print(error)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
empty True
torch.tensor True
from_numpy False
frombuffer False
torch.load False
torch.load(mmap=True) False
safetensors False
load_state_dict True
load_state_dict(assign=True) False
deepcopy of that True
Trying to resize storage that is not resizable
SEEN
