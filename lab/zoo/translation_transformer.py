"""nn.Transformer encoder and decoder with padding and causal masks, tied output embedding, Noam schedule."""

import math

import torch
from torch import nn

PAD, START, VOCABULARY, WIDTH = 0, 1, 30, 32


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.generate = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.generate.weight = self.embedding.weight
        position = torch.arange(64).unsqueeze(1)
        rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(64, WIDTH)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("positions", table, persistent=False)

    def embed(self, ids):
        return self.embedding(ids) * math.sqrt(WIDTH) + self.positions[: ids.shape[1]]

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generate(hidden)


torch.manual_seed(23)
model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: WIDTH**-0.5 * min((step + 1) ** -0.5, (step + 1) * 10**-1.5)
)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for step in range(10):
    source = torch.randint(2, VOCABULARY, (8, 11))
    lengths = torch.randint(5, 12, (8, 1))
    source = source.masked_fill(torch.arange(11) >= lengths, PAD)
    target = torch.cat([torch.full((8, 1), START), source.flip(1)], 1)
    logits = model(source, target[:, :-1])
    loss = criterion(logits.reshape(-1, VOCABULARY), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, repr(loss.item()), schedule.get_last_lr())
