"""x-transformers: an autoregressive decoder with rotary embeddings and gated feed-forwards."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
torch.set_num_threads(1)
model = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=256,
        max_seq_len=64,
        attn_layers=Decoder(dim=96, depth=4, heads=4, rotary_pos_emb=True, ff_glu=True),
    )
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(8):
    loss = model(torch.randint(0, 256, (8, 65)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
