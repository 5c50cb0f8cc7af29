#!/usr/bin/env bash
# torch 2.13.0: a list that keeps one column of each output keeps the outputs whole, and gc lists them as live Python
# objects that nothing refers to: the view holds its base in C++, so a search with gc.get_referrers for what keeps the
# memory ends at once. Only the view leads back to the list. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import gc

import torch

kept = [torch.zeros(64, 64)[:, 0] for _ in range(3)]
shapes = [tuple(one.shape) for one in gc.get_objects() if type(one) is torch.Tensor]
print(shapes.count((64, 64)), "tensors of 64x64,", shapes.count((64,)), "of 64")
bases = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (64, 64)]
print([sum(other is not bases for other in gc.get_referrers(base)) for base in bases])
print([any(other is kept for other in gc.get_referrers(view)) for view in kept])
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
3 tensors of 64x64, 3 of 64
[0, 0, 0]
[True, True, True]
SEEN
