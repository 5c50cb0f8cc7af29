"""transformers: a small random GPT-2 trained by the Trainer. With CALLBACK set, the callback records it as well."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
torch.set_num_threads(1)
rows = [torch.randint(0, 256, (64,)) for _ in range(80)]
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
callbacks = []
if os.environ.get("CALLBACK"):
    from memprof.integrations.hf import MemprofCallback

    callbacks.append(MemprofCallback(os.environ["CALLBACK"]))
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        "out",
        max_steps=8,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu="ON_GPU" not in os.environ,
        disable_tqdm=True,
        logging_steps=4,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=callbacks,
)
trainer.train()
