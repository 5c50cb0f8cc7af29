"""peft: a LLaMA with adapters, LoRA or DoRA.  lora|dora"""

import sys

import torch
from families import build, train
from peft import LoraConfig, TaskType, get_peft_model

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, batches = build("llama", "sdpa")
config = LoraConfig(
    task_type=TaskType.CAUSAL_LM,
    r=8,
    lora_alpha=16,
    lora_dropout=0.05,
    target_modules="all-linear",
    use_dora=sys.argv[1] == "dora",
)
model = get_peft_model(model, config).to(device)
model.print_trainable_parameters()
train(model, batches)
