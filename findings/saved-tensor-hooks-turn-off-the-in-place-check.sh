#!/usr/bin/env bash
# torch 2.13.0: autograd raises where a tensor that it saved was changed in place before backward; the documentation says
# that without an error, gradients are right. Under any saved_tensors_hooks there is no check, not even under hooks that
# return what they are given, as those that count saved bytes do: backward ends, with a wrong gradient. torch's own
# save_on_cpu is such hooks, and copies nothing that is on the CPU already. Behind an activation checkpoint the changed
# weight is used in silence as well. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import contextlib

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def gradient(context, is_checkpointed=False):
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(2.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x = torch.ones(1, 1, requires_grad=True)
    with context:
        y = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
    layer.weight.grad = torch.full((1, 1), -5.0)
    optimizer.step()  # between a forward and its backward, as where two networks are trained in turns
    try:
        y.backward()
    except RuntimeError as error:
        return "RuntimeError: " + str(error).partition(":")[0]
    return x.grad.item()


print("plain:", gradient(contextlib.nullcontext()))
print("hooks that change nothing:", gradient(saved_tensors_hooks(lambda one: one, lambda one: one)))
print("save_on_cpu:", gradient(save_on_cpu()))
print("checkpoint:", gradient(contextlib.nullcontext(), is_checkpointed=True))
print("hooks that copy:", gradient(saved_tensors_hooks(torch.clone, lambda one: one)), "(right)")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
plain: RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation
hooks that change nothing: 7.0
save_on_cpu: 7.0
checkpoint: 7.0
hooks that copy: 2.0 (right)
SEEN
