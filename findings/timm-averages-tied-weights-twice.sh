#!/usr/bin/env bash
# timm 1.0.31 with torch 2.13.0: ModelEmaV2 and ModelEmaV3 (with and without foreach) average what state_dict() lists,
# and that has a tied weight under each of its names. Such a weight is averaged twice an update, so that its decay is d*d
# instead of d, without a warning. torch's AveragedModel averages it once. Here averages of zeros meet weights of ones:
# one update with a decay of 0.9 should make 0.1. The module is loaded from its file, since it needs nothing but torch.
# Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
cat >job.py <<'PY'
import importlib.util
import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

spec = importlib.util.spec_from_file_location("model_ema", sys.argv[1])
model_ema = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model_ema)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def fill(model, value):
    for parameter in model.parameters():
        parameter.data.fill_(value)


def torchs(model):
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first call only copies
    return averaged, averaged.update_parameters


def timms(kind, **settings):
    def make(model):
        averaged = kind(model, decay=0.9, **settings)
        return averaged, averaged.update

    return make


for name, make in (
    ("AveragedModel", torchs),
    ("ModelEmaV2", timms(model_ema.ModelEmaV2)),
    ("ModelEmaV3", timms(model_ema.ModelEmaV3, foreach=False)),
    ("ModelEmaV3, foreach", timms(model_ema.ModelEmaV3, foreach=True)),
):
    model = Tied()
    averaged, update = make(model)
    fill(model, 1.0)
    fill(averaged, 0.0)
    update(model)
    module = averaged.module
    print(f"{name}: tied weight {module.head.weight[0, 0]:.2f}, other weight {module.inner.weight[0, 0]:.2f}")
PY
venv/bin/python job.py venv/lib/python3*/site-packages/timm/utils/model_ema.py | tee seen
diff - seen <<'SEEN'
AveragedModel: tied weight 0.10, other weight 0.10
ModelEmaV2: tied weight 0.19, other weight 0.10
ModelEmaV3: tied weight 0.19, other weight 0.10
ModelEmaV3, foreach: tied weight 0.19, other weight 0.10
SEEN
