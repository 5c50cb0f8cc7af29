"""Custom autograd.Functions: one saves its output, one keeps a tensor on ctx, one rounds straight through."""

import torch
from torch import nn
from torch.autograd import Function


class ExpSquared(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return -2 * gradient * x * y


class Drop(Function):
    @staticmethod
    def forward(ctx, x, rate):
        ctx.mask = (torch.rand_like(x) > rate).to(x.dtype) / (1 - rate)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask, None


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        hidden = Drop.apply(ExpSquared.apply(self.first(x)), 0.2)
        return nn.functional.linear(hidden, Round.apply(self.second.weight), self.second.bias)


torch.manual_seed(25)
net = Net()
optimizer = torch.optim.NAdam(net.parameters(), lr=5e-3)
for step in range(10):
    x = torch.randn(64, 16)
    loss = nn.functional.smooth_l1_loss(net(x), x[:, :4].cos())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
