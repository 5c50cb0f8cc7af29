#!/usr/bin/env bash
# torch 2.13.0, tensorboard 2.21.0: SummaryWriter.add_scalar(..., double_precision=True) writes a float of 32 bits all the
# same, without a word, unless new_style=True is given too. A count of bytes keeps 24 bits: at 20 GiB a leak of 512 bytes
# in each step is flat for three steps and then leaps by 2 KiB. With both settings the bytes are right, but the reader
# lists them among its tensors, no longer among its scalars. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 tensorboard==2.21.0 protobuf==7.36.2
cat >job.py <<'PY'
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

START = 20 << 30
for number, settings in enumerate(
    ({}, {"double_precision": True}, {"new_style": True}, {"new_style": True, "double_precision": True})
):
    with SummaryWriter(f"run-{number}") as writer:
        for step in range(4):
            writer.add_scalar("bytes", START + 512 * step, step, **settings)
    events = EventAccumulator(f"run-{number}").Reload()
    if "bytes" in events.Tags()["scalars"]:
        kind, values = "scalars", [event.value for event in events.Scalars("bytes")]
    else:
        kind, values = "tensors", [make_ndarray(event.tensor_proto).item() for event in events.Tensors("bytes")]
    print(f"{' and '.join(settings) or 'as it is'}: {kind}, 20 GiB and", [int(value) - START for value in values])
PY
venv/bin/python job.py 2>errors | tee seen
diff - seen <<'SEEN'
as it is: scalars, 20 GiB and [0, 0, 0, 2048]
double_precision: scalars, 20 GiB and [0, 0, 0, 2048]
new_style: tensors, 20 GiB and [0, 0, 0, 2048]
new_style and double_precision: tensors, 20 GiB and [0, 512, 1024, 1536]
SEEN
