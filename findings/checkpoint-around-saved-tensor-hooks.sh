#!/usr/bin/env bash
# torch 2.13.0: a non-reentrant checkpoint around a block whose forward enters saved_tensors_hooks of its own (as
# save_on_cpu does) recomputes nothing and frees nothing, without a warning: torch uses only the innermost hooks.
# The reentrant form recomputes. Seen on 2026-11-28: forward runs once instead of twice, and the block's tensors are kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, has_hooks):
        super().__init__()
        self.layer, self.has_hooks, self.calls, self.packed = torch.nn.Linear(64, 64), has_hooks, 0, 0

    def pack(self, tensor):
        self.packed += 1
        return tensor

    def forward(self, x):
        self.calls += 1
        if not self.has_hooks:
            return self.layer(x).tanh().sin()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return self.layer(x).tanh().sin()


for reentrant in (False, True):
    for has_hooks in (False, True):
        block = Block(has_hooks)
        loss = checkpoint(block, torch.randn(8, 64, requires_grad=True), use_reentrant=reentrant).sum()
        kept = block.packed
        loss.backward()
        print(f"reentrant={reentrant} own_hooks={has_hooks} forward_calls={block.calls} kept_before_backward={kept}")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
reentrant=False own_hooks=False forward_calls=2 kept_before_backward=0
reentrant=False own_hooks=True forward_calls=1 kept_before_backward=4
reentrant=True own_hooks=False forward_calls=2 kept_before_backward=0
reentrant=True own_hooks=True forward_calls=2 kept_before_backward=0
SEEN
