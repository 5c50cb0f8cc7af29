"""peft with bitsandbytes: a LLaMA whose layers are packed in 4 bits with nested quantisation, and LoRA beside them.

[8bit]: the layers are packed in 8 bits instead (LLM.int8).
"""

import sys

import bitsandbytes as bnb
import torch
from families import build, train
from peft import LoraConfig, TaskType, get_peft_model, prepare_model_for_kbit_training
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, batches = build("llama", "sdpa")
for layer in model.model.layers:
    for block in (layer.self_attn, layer.mlp):
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear) and "8bit" in sys.argv:
                packed = bnb.nn.Linear8bitLt(
                    linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=6.0
                )
                packed.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
                setattr(block, name, packed)
            elif isinstance(linear, nn.Linear):
                packed = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                )
                packed.weight = bnb.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                )
                setattr(block, name, packed)
model.to(device)
setattr(model, "is_loaded_in_8bit" if "8bit" in sys.argv else "is_loaded_in_4bit", True)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
model = get_peft_model(model, config)
train(model, batches)
