#!/usr/bin/env bash
# torch 2.13.0: a hook of register_post_accumulate_grad_hook runs once a backward, when the gradient of all uses of a
# parameter is complete; torch's tutorial updates the parameter there and frees its gradient. With use_reentrant=True,
# each checkpointed segment that uses a shared layer runs it, with that segment's part alone, and segments before it
# are recomputed with the weight that it has updated. The training goes on, with other weights. The loop's own update
# after backward is right in both forms. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch.utils.checkpoint import checkpoint


def train(use_reentrant, in_backward):
    torch.manual_seed(0)
    first, shared = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)  # `shared` is each layer, as in ALBERT
    parameters = [*first.parameters(), *shared.parameters()]
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in parameters}
    updates = 0

    def update(parameter):
        nonlocal updates
        updates += parameter is shared.weight
        optimizers[parameter].step()
        parameter.grad = None

    if in_backward:
        for each in parameters:
            each.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        x = first(torch.randn(8, 16))
        for _ in range(4):
            x = checkpoint(lambda one: shared(one).tanh(), x, use_reentrant=use_reentrant)
        x.pow(2).mean().backward()
        if not in_backward:
            for each in parameters:
                update(each)
    return updates, shared.weight.detach()


_, right = train(False, False)
for use_reentrant in (False, True):
    for in_backward in (False, True):
        updates, weight = train(use_reentrant, in_backward)
        same = "same" if torch.allclose(right, weight, atol=1e-6) else "other"
        form = f"use_reentrant={use_reentrant}, updates {'in' if in_backward else 'after'} backward"
        print(f"{form}: {updates} updates in 3 steps, {same} weight")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
use_reentrant=False, updates after backward: 3 updates in 3 steps, same weight
use_reentrant=False, updates in backward: 3 updates in 3 steps, same weight
use_reentrant=True, updates after backward: 3 updates in 3 steps, same weight
use_reentrant=True, updates in backward: 12 updates in 3 steps, other weight
SEEN
