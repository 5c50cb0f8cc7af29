"""The script has a dispatch mode and saved-tensor hooks of its own, and prints what they saw."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class CountCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


torch.manual_seed(35)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(10):
    x = torch.randn(20, 16)
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(pair):
        return pair[0].to(pair[1])

    calls, flops = CountCalls(), FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(x).logsumexp(1).mean()
    optimizer.zero_grad()
    with calls:
        loss.backward()
    with flops:
        model(x)
    optimizer.step()
    print(step, repr(loss.item()), len(packed), calls.calls, flops.get_total_flops())
