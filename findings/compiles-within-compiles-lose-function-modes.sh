#!/usr/bin/env bash
# torch 2.13.0: while TorchDynamo compiles a function, it keeps the function modes (torch.device as a context,
# torch.set_default_device, any TorchFunctionMode) aside in one place. Where that compiles another function, here in the
# fake implementation of a custom operator, the place is emptied, and the job ends: under `with torch.device("cpu")` in
# "trying to pop from empty mode stack". Without a mode, the same functions compile and run. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch

double = torch.compile(lambda values: values * 2, backend="eager")


@torch.library.custom_op("finding::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return values * 2


@twice.register_fake
def _(values):
    return double(torch.empty_like(values))


add = torch.compile(lambda values: twice(values) + 1, backend="eager")
print("without a mode:", add(torch.ones(2)).tolist())
torch._dynamo.reset()
try:
    with torch.device("cpu"):
        print("within torch.device:", add(torch.ones(2)).tolist())
except RuntimeError as error:
    print("within torch.device:", str(error).splitlines()[0])
PY
venv/bin/python job.py 2>errors | tee seen
diff - seen <<'SEEN'
without a mode: [3.0, 3.0]
within torch.device: trying to pop from empty mode stack
SEEN
