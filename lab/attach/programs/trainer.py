"""transformers' Trainer with accumulation, a scheduler and a worker of the loader."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            print(state.global_step, repr(logs["loss"]), repr(logs["grad_norm"]))


def main():
    set_seed(0)
    rows = [torch.randint(0, 256, (64,)) for _ in range(200)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=10,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            lr_scheduler_type="cosine",
            dataloader_num_workers=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            use_cpu=True,
        )
        trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[Losses()])
        printer = next(each for each in trainer.callback_handler.callbacks if "Printer" in type(each).__name__)
        trainer.remove_callback(printer)
        trainer.train()


if __name__ == "__main__":
    main()
