"""What is imported before training, in every step, and after it: memprof's own modules left out."""

import sys

import torch

SEEN: set[str] = set()


def show(when: str) -> None:
    """Prints what is there that was not before, under its name and as an attribute of its package."""
    names = {name for name in sys.modules if name.partition(".")[0] != "memprof"}
    print(when, sorted(names - SEEN), hasattr(torch.utils, "flop_counter"), hasattr(torch.utils, "module_tracker"))
    SEEN.update(names)


show("begin")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    loss = model(torch.ones(4, 8)).square().mean()
    show(f"forward {step}")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(f"step {step}")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 - the job's own, only now

with FlopCounterMode(display=False) as counter:
    model(torch.ones(4, 8))
print(counter.get_total_flops(), FlopCounterMode is sys.modules["torch.utils.flop_counter"].FlopCounterMode)
