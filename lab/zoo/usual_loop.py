"""The usual loop, for scripts of several small models: no script of the zoo itself."""

import sys

import torch


def main(models):
    """Trains the model that the command line names.

    Args:
        models: Functions by name, called with the other words of the command line. Each returns the optimizer, what
            computes a batch's loss, and, if anything is, what is done and printed after an update.
    """
    name, *options = sys.argv[1:]
    torch.manual_seed(11)
    optimizer, loss_of, *after = models[name](*options)
    for step in range(10):
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=name != "optimizer_variants" or step % 2 == 0)
        loss.backward()
        optimizer.step()
        print(step, repr(loss.item()), *(told for act in after for told in act(step)))
