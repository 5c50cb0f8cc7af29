#!/usr/bin/env bash
# torch 2.13.0: two parameters made of one storage (a head tied to an embedding by nn.Parameter(embedding.weight.data))
# are apart in a copy.deepcopy of the model, and so in AveragedModel, and after .double(): twice the memory, and training
# changes one without the other, without a word. A deepcopy keeps tensors and state dicts of one storage together, and
# torch.save keeps parameters together too. Two names of the very same Parameter stay one. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import copy
import io

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Model(nn.Module):
    def __init__(self, is_same):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight if is_same else nn.Parameter(self.embedding.weight.data)


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def says(name, tensors):
    print(f"{name}: {len({tensor.untyped_storage().data_ptr() for tensor in tensors})} storages")


says("the same Parameter, deepcopy", copy.deepcopy(Model(is_same=True)).parameters())
model = Model(is_same=False)
says("two of one storage", model.parameters())
says("torch.save and load", loaded(model).parameters())
says("deepcopy of the state dict", copy.deepcopy(model.state_dict()).values())
says("deepcopy", copy.deepcopy(model).parameters())
says("AveragedModel", AveragedModel(model).parameters())
says("double", model.double().parameters())
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
the same Parameter, deepcopy: 1 storages
two of one storage: 1 storages
torch.save and load: 1 storages
deepcopy of the state dict: 1 storages
deepcopy: 2 storages
AveragedModel: 2 storages
double: 2 storages
SEEN
