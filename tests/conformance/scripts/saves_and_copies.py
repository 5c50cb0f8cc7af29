import copy
import hashlib
import io
import pickle

import torch
from training import make, step

model, optimizer = make()
for _ in range(5):
    step(model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model, "state": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    print(hashlib.sha256(buffer.getvalue()).hexdigest(), pickle.loads(pickle.dumps(model)))
    twin = copy.deepcopy(model)
    twin(torch.zeros(1, 16))
    print(len(model._forward_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks))
torch.save(model, "model.pt")
print([tuple(p.shape) for p in torch.load("model.pt", weights_only=False).parameters()])
