import sys

import torch
from training import Model, train


class Failing(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("in an optimizer")
        return super().step(closure)


torch.manual_seed(0)
model = Model()
if sys.argv[1] == "own":
    train(model, Failing(model.parameters(), lr=0.1))
optimizer = torch.optim.Adam(model.parameters())


def spoil(number):
    if number == 3:
        state = optimizer.state[model.head.weight]
        state["exp_avg"] = torch.zeros(3)


train(model, optimizer, spoil)
