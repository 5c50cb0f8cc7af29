"""Two unrelated models with an optimizer each, trained in turn; the second learns from the first's output."""

import torch
from torch import nn

torch.manual_seed(28)
teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
student = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
teacher_optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
student_optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.5)
for step in range(10):
    x = torch.randn(48, 8)
    y = x[:, :3].argmax(1)
    teacher_loss = nn.functional.cross_entropy(teacher(x), y)
    teacher_optimizer.zero_grad()
    teacher_loss.backward()
    teacher_optimizer.step()

    with torch.no_grad():
        hints = teacher(x).log_softmax(1)
    student_loss = nn.functional.kl_div(student(x).log_softmax(1), hints, log_target=True, reduction="batchmean")
    student_optimizer.zero_grad()
    student_loss.backward()
    student_optimizer.step()
    print(step, repr(teacher_loss.item()), repr(student_loss.item()))
