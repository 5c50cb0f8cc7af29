"""trl: supervised fine-tuning of a small LLaMA on made-up texts."""

import torch
from datasets import Dataset
from transformers import set_seed
from trl import SFTConfig, SFTTrainer
from words import model, text, tokenizer

set_seed(0)
trainer = SFTTrainer(
    model=model(),
    args=SFTConfig(
        output_dir="out",
        max_steps=8,
        per_device_train_batch_size=4,
        max_length=64,
        bf16=torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    ),
    train_dataset=Dataset.from_dict({"text": [text(60, seed) for seed in range(64)]}),
    processing_class=tokenizer(),
)
trainer.train()
