"""A notebook's kernel that trains in one cell, and is asked for the losses in the next."""

import sys
import time
from pathlib import Path

from jupyter_client.manager import KernelManager

CELLS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
    """
import torch, paced
from torch import nn
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
losses = []
""",
    """
for number in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(4, (32,)))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
    print(repr(losses[-1]))
    paced.step()
""",
    "print(losses, paced.digest(model.parameters()))",
)


def run(client, code):
    """Runs a cell; prints what it prints, in the order of its lines."""
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=120)
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != asked:
            continue
        if kind == "stream":
            print(content["name"], content["text"], end="")
        elif kind == "error":
            print("error", content["ename"], content["evalue"])
        elif kind == "status" and content["execution_state"] == "idle":
            return


manager = KernelManager(kernel_cmd=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=120)
for cell in CELLS:
    run(client, cell)
client.stop_channels()
manager.shutdown_kernel()
time.sleep(0)
