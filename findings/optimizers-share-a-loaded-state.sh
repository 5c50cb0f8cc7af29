#!/usr/bin/env bash
# torch 2.13.0: a module's load_state_dict copies; an optimizer's keeps the very tensors of the dictionary. An optimizer
# that takes another's state, for a copy of a model that shall go on from there, trains with the same moments: a step of
# the second counts as one of the first too, and takes no memory. Where types differ it does copy, and casts: moments of
# 32 bits, loaded for weights of 16, are rounded to 16. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import copy

import torch
from torch.optim import Adam


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 8, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()


first = torch.nn.Linear(8, 8)
trained = Adam(first.parameters())
step(first, trained)
second = torch.nn.Linear(8, 8)
second.load_state_dict(first.state_dict())
other = Adam(second.parameters())
other.load_state_dict(trained.state_dict())
ours, theirs = trained.state[first.weight], other.state[second.weight]
print("weights shared:", first.weight.data_ptr() == second.weight.data_ptr())
print("moments shared:", ours["exp_avg"].data_ptr() == theirs["exp_avg"].data_ptr())
before = ours["exp_avg"].clone()
step(second, other)
print("a step of the second: the first is at step", int(ours["step"]), end=", ")
print("its moments as they were:", torch.equal(before, ours["exp_avg"]))
half = copy.deepcopy(first).half()
rounded = Adam(half.parameters())
rounded.load_state_dict(trained.state_dict())
print("loaded for weights of 16 bits:", ours["exp_avg"].dtype, "becomes", rounded.state[half.weight]["exp_avg"].dtype)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
weights shared: False
moments shared: True
a step of the second: the first is at step 2, its moments as they were: False
loaded for weights of 16 bits: torch.float32 becomes torch.float16
SEEN
