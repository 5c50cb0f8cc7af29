#!/usr/bin/env bash
# torch 2.13.0: MemTracker's documentation says that tensors made outside of it, and not given to track_external, are not
# tracked. The first view of one counts its whole storage, as activations, until the storage itself is freed: a batch
# sliced from a data set of 64 MiB adds 64 MiB, also when the batch is gone. A batch that an index copies adds its own
# 64 KiB, and an operator that reads the data set adds nothing of it. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch
from torch.distributed._tools.mem_tracker import MemTracker

data = torch.zeros(1024, 16, 1024)
places = torch.arange(1)
for name, read in (("sum", data.sum), ("index", lambda: data[places]), ("slice", lambda: data[:1])):
    with MemTracker() as tracker:
        batch = read()
        seen = [tracker.get_tracker_snapshot()]
        del batch
        seen.append(tracker.get_tracker_snapshot())
    totals = [one.get(data.device, {"Total": 0})["Total"] for one in seen]
    print(f"{name}: {totals[0]} bytes, {totals[1]} after del")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
sum: 4 bytes, 0 after del
index: 65536 bytes, 0 after del
slice: 67108864 bytes, 67108864 after del
SEEN
