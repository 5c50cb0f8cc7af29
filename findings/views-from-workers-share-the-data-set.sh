#!/usr/bin/env bash
# torch 2.13.0: an item that a worker of a DataLoader returns as a view of its data set, as data[i] is with
# batch_size=None or a collate function of one's own, moves the whole storage into shared memory, once for each worker:
# two items of 4 MiB, from two workers, have the process of the training map 128 MiB, and each holds 64. With a batch of
# one the items are copied first, and so with clone(). Seen on 2026-11-30 on Linux.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import re

import torch
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    def __init__(self):
        self.data = torch.zeros(16, 1 << 20)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]


def largest_shared():
    """Returns the sizes, in MiB, of what is mapped of torch's shared memory in this process, of 1 MiB and more."""
    with open("/proc/self/maps") as file:
        ranges = re.findall(r"^(\w+)-(\w+) .*/torch_", file.read(), re.MULTILINE)
    return sorted(size for start, end in ranges if (size := (int(end, 16) - int(start, 16)) >> 20))


def first_two(name, **choices):
    batches = iter(DataLoader(Items(), num_workers=2, **choices))
    one, two = next(batches), next(batches)
    held = [batch.untyped_storage().nbytes() >> 20 for batch in (one, two)]
    print(f"{name}: {one.nbytes >> 20} MiB each, held {held}, a mapping of 64 MiB: {largest_shared().count(64)}")


first_two("a batch of one", batch_size=1)
first_two("a copy", batch_size=None, collate_fn=torch.clone)
first_two("a view", batch_size=None)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
a batch of one: 4 MiB each, held [4, 4], a mapping of 64 MiB: 0
a copy: 4 MiB each, held [4, 4], a mapping of 64 MiB: 0
a view: 4 MiB each, held [64, 64], a mapping of 64 MiB: 2
SEEN
