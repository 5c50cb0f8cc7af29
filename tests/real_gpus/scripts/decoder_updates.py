"""Updates of a decoder by an AdamW written out. The GPU's model was compiled, which a dry run does not do."""

import math
import os

import torch
from decoder import Decoder
from decoder_loss import cross_entropy

WORDS, LENGTH = 50_257, 64
RATE, DECAY, FIRST, SECOND, SMALL = 1e-4, 0.01, 0.9, 0.999, 1e-8

model = Decoder(words=WORDS, length=LENGTH, width=768, hidden=3072, layers=12, heads=12).to("cuda")
moments: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {parameter: {} for parameter in model.parameters()}


def update(step: int) -> None:
    """Updates all weights; gradients are kept and added to."""
    for weight, kept in moments.items():
        gradient = weight.grad.data
        rate = RATE * math.sqrt(1 - SECOND**step) / (1 - FIRST**step)
        # The zeros are made whether they are needed or not, and what was kept before is held until the next weight.
        first_before = kept.get("first", torch.zeros_like(gradient))
        second_before = kept.get("second", torch.zeros_like(gradient))
        first = FIRST * first_before + ((1 - FIRST) * gradient)
        second = SECOND * second_before + ((1 - SECOND) * torch.square(gradient))
        weight.data -= rate * first / (torch.sqrt(second) + SMALL)
        weight.data -= RATE * DECAY * weight.data
        kept["first"], kept["second"] = first, second


def train(steps: range) -> None:
    """Trains some steps."""
    for step in steps:
        words, targets = (torch.randint(0, WORDS, (1, LENGTH)).to("cuda") for _ in range(2))
        scores = model(words)
        loss = cross_entropy(scores, targets)
        loss = loss.backward()
        update(step)


#: Steps before, of which the GPU made ten; one is enough for the sizes and the peak, and not for the segments.
warm_steps = int(os.environ.get("WARM_STEPS", "1"))
train(range(1, warm_steps + 1))
torch.cuda.memory._record_memory_history(max_entries=1_000_000)
train(range(warm_steps + 1, warm_steps + 2))
torch.cuda.memory._dump_snapshot("gpu.pickle")
