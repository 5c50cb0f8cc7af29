import sys

import torch
from training import make, step, train

model, optimizer = make()
kind = sys.argv[1]


def fail(number):
    if number != 2:  # in a recorded step
        return
    if kind == "shape":
        step(model, optimizer, torch.randn(8, 5))
    if kind == "python":
        model.blocks[1].drop.forward = lambda x: x.absent_attribute
    if kind == "exit":
        model.blocks[1].drop.forward = lambda x: sys.exit(11)
    if kind == "caught":
        import traceback

        try:
            step(model, optimizer, torch.randn(8, 5))
        except RuntimeError as error:
            traceback.print_exc()
            print(len(traceback.extract_tb(error.__traceback__)))
    if kind == "operator":
        torch.randn(3) @ torch.randn(4)
    if kind == "from_cause":
        try:
            model(torch.randn(8, 5))
        except RuntimeError as error:
            raise ValueError("wrapped") from error


train(model, optimizer, fail)
