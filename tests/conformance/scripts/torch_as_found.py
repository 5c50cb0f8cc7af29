"""What the import of torch leaves."""

import sys

import torch

print(torch.__spec__, type(torch.__spec__), torch.__loader__ is torch.__spec__.loader, type(torch.__loader__))
print(torch.__spec__._initializing, torch.__path__, torch.__file__)
print([getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path])
print(sys.path, "sitecustomize" in sys.modules)
print(torch.nn.Module.__call__.__name__, torch.nn.Module.__call__.__module__, torch.optim.Adam.step.__name__)
print(sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile())
