#!/usr/bin/env bash
# torch 2.13.0: with the cycle collector off (as trainers do to avoid its pauses), the function in which torch._dynamo is
# imported first keeps its local variables alive after it has returned: the import leaves a cycle that holds the calling
# frames. torch.utils.checkpoint imports it in its first call, so a first output may outlive `del`.
# Seen on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import gc
import weakref

import torch

gc.disable()


class Large:
    pass


def first(is_importing):
    held = Large()
    if is_importing:
        import torch._dynamo
    return weakref.ref(held)


print("without the import:", first(False)() is None)
reference = first(True)
print("with the import:", reference() is None)
gc.collect()
print("after gc.collect():", reference() is None)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
without the import: True
with the import: False
after gc.collect(): True
SEEN
