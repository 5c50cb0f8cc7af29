"""Copying sequences with an encoder and decoder of x-transformers, lengths drawn anew.

Written for this table.
"""

import torch
from x_transformers import XTransformer


def main() -> None:
    """Trains on random sequences, and generates every six steps."""
    torch.manual_seed(0)
    model = XTransformer(
        dim=64,
        tie_token_emb=True,
        return_tgt_loss=True,
        enc_num_tokens=18,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=32,
        dec_num_tokens=18,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=65,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for step in range(12):
        model.train()
        source = torch.randint(2, 18, (16, int(torch.randint(24, 33, ()))))
        target = torch.cat((torch.ones(16, 1, dtype=torch.long), source, source), 1)
        loss = model(source, target, mask=torch.ones_like(source, dtype=torch.bool))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")
        if step % 6 == 5:
            model.eval()
            made = model.generate(source[:1], target[:1, :1], 8)
            print(f"made {made.tolist()}")


if __name__ == "__main__":
    main()
