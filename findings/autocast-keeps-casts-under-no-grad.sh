#!/usr/bin/env bash
# torch 2.13.0: inside autocast, a forward under no_grad keeps a copy of each weight in the lower precision until the
# region ends, if the weight requires a gradient, although nothing can use it for one. The same forward of the same
# frozen weights (requires_grad False) keeps none. Here 8 weights of 1 MiB, 512 KiB each in bfloat16. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)])
casts = []


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and out.shape == (512, 512):
            casts.append(weakref.ref(out))
        return out


for name in ("of weights", "of frozen weights"):
    casts.clear()
    with Watch(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layers(torch.zeros(1, 512))
        print(len(casts), "casts", name + ",", sum(one() is not None for one in casts), "alive after forward")
    layers.requires_grad_(False)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
8 casts of weights, 8 alive after forward
8 casts of frozen weights, 0 alive after forward
SEEN
