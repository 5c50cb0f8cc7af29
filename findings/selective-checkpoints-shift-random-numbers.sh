#!/usr/bin/env bash
# torch 2.13.0: selective checkpointing gives wrong gradients, without a word, if its policy saves one operator that draws
# random numbers and recomputes a later one. Random numbers are drawn anew from the state at the start of the block, but
# a saved operator draws none, so that a dropout behind it is recomputed with another mask than its forward had. A plain
# checkpoint, and a policy that saves the product, are right. The loss is the same in all. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def block(weight, x):
    noisy = x * torch.rand_like(x)
    return torch.nn.functional.dropout(noisy @ weight, 0.5).square().sum()


def train(run):
    weight = torch.ones(8, 8, requires_grad=True)
    torch.manual_seed(0)
    loss = run(block, weight, torch.ones(4, 8))
    loss.backward()
    return loss, weight.grad


plain = partial(checkpoint, use_reentrant=False)
runs = {"checkpoint": plain}
for name in ("mm", "rand_like"):
    saved = [getattr(torch.ops.aten, name).default]
    runs[f"saving {name}"] = partial(plain, context_fn=partial(create_selective_checkpoint_contexts, saved))
right = train(lambda function, *inputs: function(*inputs))
for name, run in runs.items():
    loss, gradient = train(run)
    print(f"{name}: same loss {torch.equal(loss, right[0])}, same gradient {torch.allclose(gradient, right[1])}")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
checkpoint: same loss True, same gradient True
saving mm: same loss True, same gradient True
saving rand_like: same loss True, same gradient False
SEEN
