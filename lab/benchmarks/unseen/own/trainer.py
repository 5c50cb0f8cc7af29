"""A language model under the Trainer of transformers, with evaluation and checkpoints.

Written for this table.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Trains for ten steps."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=100, n_positions=64))
    arguments = TrainingArguments(
        output_dir="checkpoints",
        max_steps=10,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    for entry in trainer.state.log_history:
        print({name: value for name, value in entry.items() if name in ("loss", "eval_loss")})


if __name__ == "__main__":
    main()
