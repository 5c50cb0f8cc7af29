import torch

print(torch.ones(2, 2).sum().item())
