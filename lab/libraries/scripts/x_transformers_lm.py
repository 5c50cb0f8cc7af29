"""x-transformers: an autoregressive decoder with rotary embeddings and gated feed-forwards."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = Decoder(dim=96, depth=4, heads=4, rotary_pos_emb=True, ff_glu=True, attn_flash=True)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    loss = model(torch.randint(0, 256, (8, 65), device=device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
