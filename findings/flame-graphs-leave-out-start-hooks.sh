#!/usr/bin/env bash
# torch 2.13.0: torch.cuda._memory_viz leaves out of its flame graphs each function whose name contains "_start", and
# each file whose name contains "/Register": also Lightning's on_train_batch_start, or models/RegisterTokens.py. What
# they allocate is shown under whoever called them. Seen on 2026-11-30, with a snapshot written by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
from torch.cuda._memory_viz import memory


def block(address, *calls):
    frames = [{"filename": file, "line": 7, "name": name} for file, name in calls]
    state = {"state": "active_allocated", "frames": frames}
    return {"address": address, "size": 512, "requested_size": 512, **state}


blocks = [
    block(0, ("callback.py", "on_train_batch_start"), ("fit.py", "fit")),
    block(512, ("callback.py", "on_train_batch_end"), ("fit.py", "fit")),
    block(1024, ("models/RegisterTokens.py", "forward"), ("fit.py", "fit")),
    block(1536, ("models/register_tokens.py", "forward"), ("fit.py", "fit")),
]
segment = {"device": 0, "address": 0, "total_size": 2048, "stream": 0, "blocks": blocks}
print(memory({"segments": [segment], "device_traces": [[]]}, format_flamegraph=str.strip))
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
stream_0;active_allocated;fit.py:7:fit 512
stream_0;active_allocated;fit.py:7:fit;callback.py:7:on_train_batch_end 512
stream_0;active_allocated;fit.py:7:fit 512
stream_0;active_allocated;fit.py:7:fit;register_tokens.py:7:forward 512
SEEN
