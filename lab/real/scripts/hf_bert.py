"""transformers: a small random BERT that classifies, accumulating over two batches, with an evaluation in between."""

import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
torch.set_num_threads(1)
rows = [{"input_ids": torch.randint(0, 256, (64,)), "labels": torch.tensor(i % 2)} for i in range(64)]
config = BertConfig(
    vocab_size=256,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=192,
    max_position_embeddings=64,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        "out",
        max_steps=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=7,
        report_to=[],
        save_strategy="no",
        use_cpu="ON_GPU" not in os.environ,
        disable_tqdm=True,
    ),
    train_dataset=rows,
    eval_dataset=rows[:8],
)
trainer.train()
