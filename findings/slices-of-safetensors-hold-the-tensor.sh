#!/usr/bin/env bash
# safetensors 0.8.0: get_slice is for loading a part of a tensor, as each rank of tensor parallelism does. Into numpy it
# reads that part; into torch on the CPU it returns a view of the whole tensor, not contiguous for columns. What copies
# whole storages copies it all: torch.save writes the tensor of 4 MiB for an eighth of it, and so do pickle and
# copy.deepcopy. save_file refuses the columns. A clone(), or .contiguous() for columns, parts with the rest.
# Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 packaging==26.3
cat >job.py <<'PY'
import copy
import os

import torch
from safetensors import safe_open
from safetensors.torch import save_file

save_file({"weight": torch.zeros(1024, 1024)}, "model.safetensors")
with safe_open("model.safetensors", "np") as file:
    part = file.get_slice("weight")[:, :128]
    print(f"numpy, columns: {part.nbytes} bytes, contiguous: {part.flags.c_contiguous}")
with safe_open("model.safetensors", "pt") as file:
    weight = file.get_slice("weight")
    for name, part in (("rows", weight[:128]), ("columns", weight[:, :128]), ("clone", weight[:128].clone())):
        torch.save(part, "part.pt")
        sizes = part.untyped_storage().nbytes(), copy.deepcopy(part).untyped_storage().nbytes(), os.path.getsize("part.pt")
        print(f"torch, {name}: {part.nbytes} bytes, contiguous: {part.is_contiguous()},", end=" ")
        print("storage, deepcopy and file of", *(f"{size / (1 << 20):.1f}" for size in sizes), "MiB")
    try:
        save_file({"part": weight[:, :128]}, "part.safetensors")
    except ValueError as error:
        print(str(error).partition(":")[0])
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
numpy, columns: 524288 bytes, contiguous: True
torch, rows: 524288 bytes, contiguous: True, storage, deepcopy and file of 4.0 4.0 4.0 MiB
torch, columns: 524288 bytes, contiguous: False, storage, deepcopy and file of 4.0 4.0 4.0 MiB
torch, clone: 524288 bytes, contiguous: True, storage, deepcopy and file of 0.5 0.5 0.5 MiB
You are trying to save a non contiguous tensor
SEEN
