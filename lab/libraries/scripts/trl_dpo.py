"""trl: direct preference optimisation of a small LLaMA against a reference model."""

import torch
from datasets import Dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer
from words import model, text, tokenizer

set_seed(0)
pairs = {
    "prompt": [text(16, seed) for seed in range(64)],
    "chosen": [text(24, seed + 100) for seed in range(64)],
    "rejected": [text(24, seed + 200) for seed in range(64)],
}
trainer = DPOTrainer(
    model=model(),
    ref_model=model(),
    args=DPOConfig(
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
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer(),
)
trainer.train()
