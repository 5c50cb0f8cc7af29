"""transformers: a small random LLaMA in a loop written by hand, with clipped gradients and a scheduler."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)
for _ in range(8):
    rows = torch.randint(0, 256, (8, 64))
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(loss.item())
