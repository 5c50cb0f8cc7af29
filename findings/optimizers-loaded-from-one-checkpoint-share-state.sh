#!/usr/bin/env bash
# torch 2.13.0: Module.load_state_dict copies, Optimizer.load_state_dict does not: tensors of the parameter's type and
# device become the optimizer's state as they are. Two trainings begun from one loaded checkpoint (members of an
# ensemble, trials of a learning rate) update each other's moments, and count each other's steps, without an error. Nor
# can the checkpoint be loaded a second time to go back: it has trained as well. Where the type differs, it is copied.
# Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch


def make():
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer):
    model(torch.randn(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load(checkpoint):
    model, optimizer = make()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


first = make()
step(*first)
torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, "checkpoint.pt")
checkpoint = torch.load("checkpoint.pt")
trials = [load(checkpoint) for _ in range(3)]
state = [optimizer.state[model.weight] for model, optimizer in trials]
for name in ("step", "exp_avg", "exp_avg_sq"):
    print(name, "of 3 optimizers:", len({each[name].data_ptr() for each in state}), "storage")
print("weight of 3 models:", len({model.weight.data_ptr() for model, _ in trials}), "storages")
for each in trials:
    step(*each)
print("each trial trained for 1 step after the checkpoint's 1; their step:", [each["step"].item() for each in state])
print("step in the checkpoint:", checkpoint["optimizer"]["state"][0]["step"].item())
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
step of 3 optimizers: 1 storage
exp_avg of 3 optimizers: 1 storage
exp_avg_sq of 3 optimizers: 1 storage
weight of 3 models: 3 storages
each trial trained for 1 step after the checkpoint's 1; their step: [4.0, 4.0, 4.0]
step in the checkpoint: 4.0
SEEN
