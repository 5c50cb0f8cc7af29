#!/usr/bin/env bash
# torch 2.13.0, came-pytorch 0.1.3: some optimizers hold state in float32 for parameters in bfloat16. torch's
# Optimizer.load_state_dict casts each floating-point state but `step` to its parameter's type, without a warning. With
# CAME it stays there: a resumed training holds 2.1 bytes of state a parameter instead of 4.2, and its updates are
# others than those of the training that was not interrupted. Of torch's own, NAdam is hit: its product of momenta, a
# scalar, stays rounded. With parameters in float32, resuming changes nothing. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps came-pytorch==0.1.3
cat >job.py <<'PY'
import torch
from came_pytorch import CAME


def train(kind, dtype, resume_at=None):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 128).to(dtype))
    optimizer = kind([weight], lr=0.01)
    for step in range(8):
        if step == resume_at:
            torch.save((weight.detach(), optimizer.state_dict()), "checkpoint.pt")
            data, state = torch.load("checkpoint.pt")
            weight = torch.nn.Parameter(data)
            optimizer = kind([weight], lr=0.01)
            optimizer.load_state_dict(state)
        weight.grad = torch.randn(64, 128).to(dtype)
        optimizer.step()
    tensors = [each for each in optimizer.state[weight].values() if torch.is_tensor(each)]
    kinds = " and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
    return weight.detach(), f"{sum(each.nbytes for each in tensors) / weight.numel():.2f} bytes a parameter in {kinds}"


for dtype in (torch.float32, torch.bfloat16):
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, CAME):
        whole, held = train(kind, dtype)
        resumed, held_after = train(kind, dtype, resume_at=5)
        same = "same weights" if torch.equal(whole, resumed) else "other weights"
        after = "the same" if held == held_after else held_after
        print(f"{kind.__name__}, {str(dtype).removeprefix('torch.')}: {held}; resumed: {after}, {same}")
PY
venv/bin/python -W ignore job.py | tee seen
diff - seen <<'SEEN'
AdamW, float32: 8.00 bytes a parameter in float32; resumed: the same, same weights
NAdam, float32: 8.00 bytes a parameter in float32; resumed: the same, same weights
ASGD, float32: 4.00 bytes a parameter in float32; resumed: the same, same weights
CAME, float32: 4.19 bytes a parameter in float32; resumed: the same, same weights
AdamW, bfloat16: 4.00 bytes a parameter in bfloat16 and float32; resumed: the same, same weights
NAdam, bfloat16: 4.00 bytes a parameter in bfloat16 and float32; resumed: the same, other weights
ASGD, bfloat16: 2.00 bytes a parameter in bfloat16 and float32; resumed: the same, same weights
CAME, bfloat16: 4.19 bytes a parameter in bfloat16 and float32; resumed: 2.09 bytes a parameter in bfloat16, other weights
SEEN
