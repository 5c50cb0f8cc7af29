"""GPT-2 of random weights fine-tuned through adapters of peft, with accumulation.

Written for this table.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

ACCUMULATED = 2


def main() -> None:
    """Trains the adapters on random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=4, n_embd=96, vocab_size=512, n_positions=64)
    settings = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(GPT2LMHeadModel(config), settings)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 20)
    tokens = torch.randint(0, 512, (96, 64))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4, shuffle=True)
    model.train()
    for index, (batch,) in enumerate(loader):
        loss = model(input_ids=batch, labels=batch).loss / ACCUMULATED
        loss.backward()
        print(f"batch {index} loss {loss.item():.6f}")
        if index % ACCUMULATED == ACCUMULATED - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
