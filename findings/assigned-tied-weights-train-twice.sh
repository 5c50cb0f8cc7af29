#!/usr/bin/env bash
# torch 2.13.0: load_state_dict(assign=True), which spares the second copy of a model, unties a tied weight by half: each
# of its names becomes a parameter of its own on one storage. Nothing looks wrong after loading, the sizes of storages
# add up as before. But parameters() lists both, each has its gradient and optimizer state, so that Adam holds twice the
# bytes and updates the shared numbers twice a step, once by each part of the gradient. The same with assign=False, and
# with assign=True if the weights are tied again. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import torch


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


torch.manual_seed(0)
torch.save(Tied().state_dict(), "tied.pt")
start = torch.load("tied.pt")["head.weight"].clone()
for name, assign, retie in (("assign=False", False, False), ("assign=True", True, False), ("tied again", True, True)):
    model = Tied()
    model.load_state_dict(torch.load("tied.pt"), assign=assign)
    if retie:
        model.head.weight = model.embedding.weight
    storages = {each.untyped_storage().data_ptr(): each.nbytes for each in model.parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(model(torch.arange(100)), torch.arange(100)).backward()
    optimizer.step()
    held = sum(each["exp_avg"].nbytes + each["exp_avg_sq"].nbytes for each in optimizer.state.values())
    moved = (model.head.weight - start).abs().max().item()
    print(f"{name}: {sum(storages.values())} bytes of weights in {len(list(model.parameters()))} parameter(s), "
          f"{held} of Adam's state; the first step of 0.01 moves a number by up to {moved:.3f}")
PY
venv/bin/python job.py | tee seen
diff - seen <<'SEEN'
assign=False: 6400 bytes of weights in 1 parameter(s), 12800 of Adam's state; the first step of 0.01 moves a number by up to 0.010
assign=True: 6400 bytes of weights in 2 parameter(s), 25600 of Adam's state; the first step of 0.01 moves a number by up to 0.020
tied again: 6400 bytes of weights in 1 parameter(s), 12800 of Adam's state; the first step of 0.01 moves a number by up to 0.010
SEEN
