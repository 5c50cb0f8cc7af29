#!/usr/bin/env bash
# torch 2.13.0: torch.nested.nested_tensor(layout=torch.jagged) under FakeTensorMode(), as its constructor makes it,
# raises an AssertionError without words for the user ("self.shape_env must not be None"); with an explicit ShapeEnv it
# works. Every other tensor constructor works in both. Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def jagged():
    return torch.nested.nested_tensor([torch.randn(3, 2), torch.randn(4, 2)], layout=torch.jagged)


try:
    with FakeTensorMode():
        jagged()
except AssertionError as error:
    print("AssertionError:", error)
with FakeTensorMode(shape_env=ShapeEnv()):
    print(tuple(jagged().values().shape))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
AssertionError: self.shape_env must not be None
(7, 2)
SEEN
