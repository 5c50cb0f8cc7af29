#!/usr/bin/env bash
# torch 2.13.0: Tensor.nbytes raises for a sparse COO tensor (and says why), but for CSR and its siblings returns the bytes of the
# dense tensor instead of those that are held, which may be less or more. Sums of parameter sizes over a model with such
# a parameter end in an error or are wrong. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch

dense = torch.zeros(100, 100)
dense[0, 0] = 1.0
full = torch.ones(4, 4)
for name, tensor in (("one of 100 x 100", dense), ("all of 4 x 4", full)):
    csr = tensor.to_sparse_csr()
    held = sum(part.nbytes for part in (csr.crow_indices(), csr.col_indices(), csr.values()))
    print(f"CSR, {name}: nbytes {csr.nbytes}, held {held}")
try:
    print(full.to_sparse_coo().nbytes)
except RuntimeError as error:
    print("COO:", str(error).partition(".")[0])
PY
venv/bin/python -W ignore job.py | tee seen
diff - seen <<'SEEN'
CSR, one of 100 x 100: nbytes 40000, held 820
CSR, all of 4 x 4: nbytes 64, held 232
COO: nbytes is not defined for sparse tensors
SEEN
