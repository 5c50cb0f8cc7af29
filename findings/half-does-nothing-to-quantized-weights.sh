#!/usr/bin/env bash
# torchao 0.18.0 with torch 2.13.0: half() of a weight that was quantized to int8 (weight only) returns it in float32,
# without an error. So module.half() converts biases and norms and leaves the quantized weights: the model takes
# float16 inputs, and looks converted. bfloat16() and to(torch.float16) do as little. Converted before it is quantized,
# a weight says float16. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchao==0.18.0
cat >job.py <<'PY'
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)


def made():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))


def types(model):
    return ", ".join(f"{name} {str(each.dtype).removeprefix('torch.')}" for name, each in model.named_parameters())


late, early = made(), made().half()
quantize_(late, Int8WeightOnlyConfig())
quantize_(early, Int8WeightOnlyConfig())
weight = late[0].weight
print("half, bfloat16, to:", weight.half().dtype, weight.bfloat16().dtype, weight.to(torch.float16).dtype)
print("quantized, then half():", types(late.half()))
print("half(), then quantized:", types(early))
for dtype in (torch.float16, torch.float32):
    try:
        print(f"{dtype} in, {late(torch.randn(2, 64, dtype=dtype)).dtype} out")
    except RuntimeError as error:
        print(f"{dtype} in: {error}")
PY
venv/bin/python job.py 2>errors | tee seen || { cat errors; exit 1; }
diff - seen <<'SEEN'
half, bfloat16, to: torch.float32 torch.float32 torch.float32
quantized, then half(): 0.weight float32, 0.bias float16, 1.weight float16, 1.bias float16
half(), then quantized: 0.weight float16, 0.bias float16, 1.weight float16, 1.bias float16
torch.float16 in, torch.float16 out
torch.float32 in: mixed dtype (CPU): expect parameter to have scalar type of Float
SEEN
