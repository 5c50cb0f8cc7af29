#!/usr/bin/env bash
# pyarrow 26.0.1: importing pyarrow.parquet, to read a local file, imports Python's ssl, since pyarrow.fs looks for
# certificates of remote stores when it is imported. A Python built without OpenSSL imports pyarrow and writes Arrow's
# own IPC files, and can read no Parquet file. Such a build is stood for by a module _ssl that cannot be imported.
# Seen on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check pyarrow==26.0.1
cat >job.py <<'PY'
import sys

import pyarrow as pa

print("with pyarrow:", "ssl" in sys.modules)
with pa.ipc.new_file("numbers.arrow", pa.schema([("numbers", pa.int64())])) as file:
    file.write(pa.record_batch({"numbers": pa.array([1, 2], pa.int64())}))
print("Arrow file:", pa.ipc.open_file("numbers.arrow").read_all().num_rows, "rows")
try:
    import pyarrow.parquet  # noqa: F401
except ImportError as error:
    print("pyarrow.parquet:", type(error).__name__)
else:
    print("with pyarrow.parquet:", "ssl" in sys.modules)
PY
{
    venv/bin/python job.py
    venv/bin/python -c 'import runpy, sys; sys.modules["_ssl"] = None; runpy.run_path("job.py")'
} | tee seen
diff - seen <<'SEEN'
with pyarrow: False
Arrow file: 2 rows
with pyarrow.parquet: True
with pyarrow: False
Arrow file: 2 rows
pyarrow.parquet: ModuleNotFoundError
SEEN
