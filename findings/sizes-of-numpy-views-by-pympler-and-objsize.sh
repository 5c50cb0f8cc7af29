#!/usr/bin/env bash
# Pympler 1.1, objsize 0.8.0, numpy 2.4.6: neither measures an array that is a view. Pympler's asizeof adds the bytes of
# the view to those of the array that it looks into, so that 8 MiB reshaped are 16; one number broadcast to 8 MiB is 8,
# and two halves are 16. objsize stops at a view: one that alone keeps 8 MiB alive has next to nothing, and nor has a
# broadcast one. In an array of objects neither counts the objects. What is held is 8 MiB in each line but two: broadcast,
# of a few bytes, and objects, of 16 MiB. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check pympler==1.1 objsize==0.8.0 numpy==2.4.6
cat >job.py <<'PY'
import numpy as np
import objsize
from pympler import asizeof

COUNT = 1 << 20
objects = np.empty(2, dtype=object)
objects[:] = [np.zeros(COUNT), np.zeros(COUNT)]
for name, held in {
    "array": np.zeros(COUNT),
    "reshaped": np.zeros(COUNT).reshape(1024, 1024),
    "ten numbers": np.zeros(COUNT)[:10],
    "both halves": np.split(np.zeros(COUNT), 2),
    "broadcast": np.broadcast_to(np.zeros(1), COUNT),
    "objects": objects,
}.items():
    sizes = asizeof.asizeof(held), objsize.get_deep_size(held)
    print(f"{name}: Pympler {sizes[0] / (1 << 20):.0f} MiB, objsize {sizes[1] / (1 << 20):.0f} MiB")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
array: Pympler 8 MiB, objsize 8 MiB
reshaped: Pympler 16 MiB, objsize 0 MiB
ten numbers: Pympler 8 MiB, objsize 0 MiB
both halves: Pympler 16 MiB, objsize 0 MiB
broadcast: Pympler 8 MiB, objsize 0 MiB
objects: Pympler 0 MiB, objsize 0 MiB
SEEN
