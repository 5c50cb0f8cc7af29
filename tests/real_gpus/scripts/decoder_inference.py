"""Inference of a decoder in bfloat16 by autocasting, under inference_mode."""

import torch
from decoder import Decoder

model = Decoder(words=10_000, length=512, width=1024, hidden=4096, layers=24, heads=16).to("cuda")
warm_up = torch.randint(0, 10_000, (5, 4, 512), device="cuda")
words = torch.randint(0, 10_000, (1, 4, 512), device="cuda")
model.eval()
with torch.inference_mode():
    for step in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            model(warm_up[step])
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    with torch.autocast("cuda", torch.bfloat16):
        model(words[0])
torch.cuda.memory._dump_snapshot("gpu.pickle")
