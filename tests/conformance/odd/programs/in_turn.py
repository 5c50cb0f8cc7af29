"""Calls the functions of a program that its command line names."""

import random
import sys

import numpy


def call(functions):
    """Calls one, or several, each as if it were the first; an error ends that one alone."""
    import torch

    for name in sys.argv[1:]:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        print("##", name, flush=True)
        try:
            functions[name]()
        except Exception as error:
            if len(sys.argv) == 2:
                raise
            print(type(error).__name__, str(error)[:80])
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
