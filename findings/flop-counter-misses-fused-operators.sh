#!/usr/bin/env bash
# torch 2.13.0: torch.utils.flop_counter counts the operators of a list of its own, and others as nothing, without a word.
# An encoder in eval() under no_grad takes a fused path and costs 0; with gradients the same layer costs 4.5 million. On
# the CPU attention itself costs nothing, since its fused operator for the CPU is not in the list, and nor does an LSTM or
# a product with a vector; attention in plain operators is counted. Costs of recomputing from it are too low.
# Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count(name, run):
    with FlopCounterMode(display=False) as counter:
        run()
    print(f"{name}: {counter.get_total_flops()}")


encoder, batch = nn.TransformerEncoderLayer(64, 4, batch_first=True).eval(), torch.ones(1, 8, 64)
count("encoder", lambda: encoder(batch))
with torch.no_grad():
    count("encoder, no_grad", lambda: encoder(batch))
heads = torch.ones(1, 4, 8, 16)
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(backend):
        count(backend.name, lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads))
count("LSTM", lambda: nn.LSTM(64, 64)(batch))
count("matrix by matrix", lambda: torch.ones(64, 64) @ torch.ones(64, 1))
count("matrix by vector", lambda: torch.ones(64, 64) @ torch.ones(64))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
encoder: 4456448
encoder, no_grad: 0
FLASH_ATTENTION: 0
MATH: 16384
LSTM: 0
matrix by matrix: 8192
matrix by vector: 0
SEEN
