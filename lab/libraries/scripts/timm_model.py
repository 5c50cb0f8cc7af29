"""timm: an image model, random images, the library's own AdamW, scheduler and loss."""

import sys

import torchvision_names  # noqa: F401 - before timm, which imports torchvision

# isort: split
import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

torch.manual_seed(0)
name, size = sys.argv[1], int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = torch.randn(32, 3, size, size), torch.randint(0, 10, (32,))
model = timm.create_model(name, num_classes=10, pretrained=False, **eval(sys.argv[3]) if len(sys.argv) > 3 else {})  # noqa: S307
model = model.to(device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=8)
criterion = LabelSmoothingCrossEntropy(0.1)
for step in range(8):
    batch = torch.arange(8) + 8 * (step % 4)
    loss = criterion(model(images[batch].to(device)), labels[batch].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(step)
    print(step, loss.item())
