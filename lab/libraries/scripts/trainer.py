"""transformers' Trainer: a small GPT-2 with a scheduler, accumulation, workers of a loader and an evaluation."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
rows = [torch.randint(0, 256, (64,)) for _ in range(200)]
data = [{"input_ids": row, "labels": row} for row in rows]
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        "out",
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        eval_strategy="steps",
        eval_steps=6,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    ),
    train_dataset=data,
    eval_dataset=data[:16],
)
trainer.train()
