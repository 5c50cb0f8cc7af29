"""Forward of a decoder of 3.4 billion parameters in float32, whose graph is built and thrown away."""

import torch
from decoder import Decoder

model = Decoder(words=10_000, length=512, width=2560, hidden=10_240, layers=32, heads=32).to("cuda")
words = torch.randint(0, 10_000, (4, 512)).to("cuda")


def run() -> None:
    """Keeps the scores until it returns."""
    _scores = model(words)


for step in range(6):
    if step == 5:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    run()
torch.cuda.memory._dump_snapshot("gpu.pickle")
