"""A torch that cannot be imported, first caught and then not."""

import sys
import traceback

try:
    import torch
except ImportError:
    traceback.print_exc()
print("torch" in sys.modules)
import torch.nn
