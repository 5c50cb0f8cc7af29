#!/usr/bin/env bash
# peft 0.21.2: an adapter of fewer parameters may need far more memory. HRA has half of LoRA's at the same rank of 8, and
# keeps 9 tensors of the size of the layer's weight from forward to backward, even for one token: it multiplies the
# weight by each reflection in turn. With apply_GS=True, described as a choice of numerics, it is about 1. LoRA
# keeps none, DoRA 1, WaveFT and BOFT about 1. Counted are storages that autograd saves for backward, without parameters
# and buffers, for a weight of 256 x 256. Seen on 2026-11-30 with torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0
cat >job.py <<'PY'
import torch
from peft import BOFTConfig, HRAConfig, LoraConfig, WaveFTConfig, get_peft_model


def measure(name, settings):
    torch.manual_seed(0)
    base = torch.nn.Sequential()
    base.add_module("layer", torch.nn.Linear(256, 256, bias=False))
    model = get_peft_model(base, settings)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            own.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.ones(1, 256))
    weights = sum(each.nbytes() for each in kept) / (256 * 256 * 4)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    print(f"{name}: {trained} trained numbers, keeps {weights:.1f} weights for backward of {len(output)} token")


measure("LoRA", LoraConfig(target_modules=["layer"]))
measure("DoRA", LoraConfig(target_modules=["layer"], use_dora=True))
measure("WaveFT", WaveFTConfig(target_modules=["layer"]))
measure("BOFT", BOFTConfig(target_modules=["layer"]))
measure("HRA", HRAConfig(target_modules=["layer"]))
measure("HRA, apply_GS", HRAConfig(target_modules=["layer"], apply_GS=True))
PY
venv/bin/python -W ignore job.py 2>errors | tee seen
diff - seen <<'SEEN'
LoRA: 4096 trained numbers, keeps 0.0 weights for backward of 1 token
DoRA: 4352 trained numbers, keeps 1.1 weights for backward of 1 token
WaveFT: 2592 trained numbers, keeps 1.2 weights for backward of 1 token
BOFT: 1280 trained numbers, keeps 1.1 weights for backward of 1 token
HRA: 2048 trained numbers, keeps 9.1 weights for backward of 1 token
HRA, apply_GS: 2048 trained numbers, keeps 1.2 weights for backward of 1 token
SEEN
