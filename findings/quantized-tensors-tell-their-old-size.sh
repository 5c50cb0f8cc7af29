#!/usr/bin/env bash
# torchao 0.18.0 with torch 2.13.0: a weight quantized to int8 and the state of an 8-bit optimizer keep the type and the
# number of elements that they stand for, and so nbytes, element_size() and even untyped_storage().nbytes() tell the
# bytes from before: four times what the inner tensors hold. Whoever adds these up sees no saving. transformers 5.23.0
# does: get_memory_footprint() of a model is the same before and after, while its saved file shrinks. True are the sums
# over __tensor_flatten__(). Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchao==0.18.0 \
    transformers==5.23.0
cat >job.py <<'PY'
import io

import torch
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM


def told(name, tensor):
    inner = [getattr(tensor, each) for each in tensor.__tensor_flatten__()[0]]
    print(f"{name}: nbytes {tensor.nbytes}, storage {tensor.untyped_storage().nbytes()}, "
          f"inner tensors {sum(each.nbytes for each in inner)}")


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell() // 2**20


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
quantize_(model, Int8WeightOnlyConfig())
told("int8 weight", model[0].weight)
weight = torch.nn.Parameter(torch.randn(1024, 1024))
optimizer = AdamW8bit([weight])
weight.grad = torch.randn_like(weight)
optimizer.step()
told("8-bit state", optimizer.state[weight]["exp_avg"])
sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8}
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
for name in ("before", "after"):
    if name == "after":
        quantize_(llama, Int8WeightOnlyConfig())
    print(f"{name}: get_memory_footprint() {llama.get_memory_footprint() // 2**20} MiB, saved {saved(llama)} MiB")
PY
venv/bin/python job.py 2>errors | tee seen || { cat errors; exit 1; }
diff - seen <<'SEEN'
int8 weight: nbytes 4194304, storage 4194304, inner tensors 1053696
8-bit state: nbytes 4194304, storage 4194304, inner tensors 1065984
before: get_memory_footprint() 40 MiB, saved 40 MiB
after: get_memory_footprint() 40 MiB, saved 10 MiB
SEEN
