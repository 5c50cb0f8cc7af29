#!/usr/bin/env bash
# pyarrow 26.0.1: pyarrow.array imports pandas, if it is installed, to ask whether a numpy array or a list is one of
# pandas' objects. A program that writes a Parquet file of numbers and never names pandas loads all of it. Arrays made
# of the same buffer (Array.from_buffers), and writing them, do not. Seen on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check pyarrow==26.0.1 pandas==3.1.1 numpy==2.4.6
cat >job.py <<'PY'
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

numbers = np.arange(3)
column = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
pq.write_table(pa.table({"numbers": column}), "numbers.parquet")
print("from_buffers:", "pandas" in sys.modules)
pa.array(numbers)
print("array:", "pandas" in sys.modules)
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
from_buffers: False
array: True
SEEN
