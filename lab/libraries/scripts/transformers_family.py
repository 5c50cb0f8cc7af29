"""transformers: a small random model of a family, in a loop by hand.  FAMILY [eager|sdpa]"""

import sys

import torch
from families import build, train

torch.manual_seed(0)
family, attention = sys.argv[1], (sys.argv[2:] or [None])[0]
device = "cuda" if torch.cuda.is_available() else "cpu"
model, batches = build(family, attention)
model.to(device).train()
train(model, batches, clips=True)
