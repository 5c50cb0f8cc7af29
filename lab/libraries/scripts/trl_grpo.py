"""trl: group relative policy optimisation of a small LLaMA, with its own rollouts and a made-up reward."""

import torch
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer
from words import model, text, tokenizer


def reward(completions, **_):
    """Rewards completions with many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


set_seed(0)
trainer = GRPOTrainer(
    model=model(),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir="out",
        max_steps=8,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        bf16=torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    ),
    train_dataset=Dataset.from_dict({"prompt": [text(12, seed) for seed in range(64)]}),
    processing_class=tokenizer(),
)
trainer.train()
