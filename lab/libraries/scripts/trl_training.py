"""trl: a small LLaMA on made-up texts, by one of its trainers.  sft|dpo|grpo

sft: supervised fine-tuning; dpo: direct preference optimisation against a reference model; grpo: group relative policy
optimisation with its own rollouts and a made-up reward.
"""

import sys

import torch
import trl
from datasets import Dataset
from transformers import set_seed
from words import model, text, tokenizer


def reward(completions, **_):
    """Rewards completions with many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def texts(count, first=0):
    return [text(count, seed + first) for seed in range(64)]


#: The settings of each trainer beyond the common ones, its data, and its further arguments.
TRAINERS = {
    "sft": ({"max_length": 64}, lambda: {"text": texts(60)}, dict),
    "dpo": (
        {"max_length": 64},
        lambda: {"prompt": texts(16), "chosen": texts(24, 100), "rejected": texts(24, 200)},
        lambda: {"ref_model": model()},
    ),
    "grpo": (
        {"num_generations": 4, "max_completion_length": 8},
        lambda: {"prompt": texts(12)},
        lambda: {"reward_funcs": reward},
    ),
}

set_seed(0)
kind = sys.argv[1]
settings, data, further = TRAINERS[kind]
config = getattr(trl, f"{kind.upper()}Config")(
    output_dir="out",
    max_steps=8,
    per_device_train_batch_size=4,
    bf16=torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=1,
    **settings,
)
trainer = getattr(trl, f"{kind.upper()}Trainer")(
    model=model(), args=config, train_dataset=Dataset.from_dict(data()), processing_class=tokenizer(), **further()
)
trainer.train()
