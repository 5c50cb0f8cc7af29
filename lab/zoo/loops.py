"""Loops of particular kinds around models that are nothing special: loops.py NAME."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap


def gradient_accumulation():
    """Gradient accumulation: four micro-batches to each optimizer update."""
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [(torch.randn(24, 64), torch.randint(8, (24,))) for _ in range(40)]
    running = 0.0
    for index, (inputs, labels) in enumerate(data):
        loss = F.cross_entropy(model(inputs), labels) / 4
        loss.backward()
        running += loss.item()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(index, repr(running))
            running = 0.0


def optimizer_in_backward():
    """One optimizer to each parameter, stepped inside backward as soon as the gradient is there."""
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(10):
        x, y = torch.randn(40, 32), torch.randint(5, (40,))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        print(step, repr(loss.item()))


def scheduler_and_eval():
    """Learning-rate schedule, and an evaluation under no_grad every third step."""
    model = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12)
    held_out = torch.randn(200, 12)
    held_out_labels = (held_out.sum(1) > 0).long()

    def evaluate():
        model.eval()
        with torch.no_grad():
            correct = (model(held_out).argmax(1) == held_out_labels).float().mean()
        model.train()
        return correct.item()

    for step in range(12):
        x = torch.randn(40, 12)
        loss = F.cross_entropy(model(x), (x.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(step, repr(loss.item()), scheduler.get_last_lr()[0])
        if step % 3 == 2:
            print("held out:", repr(evaluate()))


def two_models_in_turn():
    """Two unrelated models with an optimizer each, trained in turn; the second learns from the first's output."""
    teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    student = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    teacher_optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    student_optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.5)
    for step in range(10):
        x = torch.randn(48, 8)
        teacher_loss = F.cross_entropy(teacher(x), x[:, :3].argmax(1))
        teacher_optimizer.zero_grad()
        teacher_loss.backward()
        teacher_optimizer.step()
        with torch.no_grad():
            hints = teacher(x).log_softmax(1)
        student_loss = F.kl_div(student(x).log_softmax(1), hints, log_target=True, reduction="batchmean")
        student_optimizer.zero_grad()
        student_loss.backward()
        student_optimizer.step()
        print(step, repr(teacher_loss.item()), repr(student_loss.item()))


def wgan():
    """Wasserstein GAN: five critic updates with clipped weights for each one of the generator."""
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=5e-4)

    def real_points(count):
        angles = torch.rand(count) * 2 * torch.pi
        return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2)

    for round_ in range(10):
        for _ in range(5):
            critic_optimizer.zero_grad()
            with torch.no_grad():
                fake = generator(torch.randn(128, 4))
            distance = critic(real_points(128)).mean() - critic(fake).mean()
            (-distance).backward()
            critic_optimizer.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.01, 0.01)
        generator_optimizer.zero_grad()
        loss = -critic(generator(torch.randn(128, 4))).mean()
        loss.backward()
        generator_optimizer.step()
        print(round_, repr(distance.item()), repr(loss.item()))


def manual_update():
    """No optimizer: the parameters are updated by hand."""
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1))
    for step in range(10):
        x = torch.randn(30, 10)
        loss = (model(x) - x.square().sum(1, keepdim=True)).abs().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        print(step, repr(loss.item()))


def functional_training():
    """torch.func training: the model is called through functional_call only, gradients come from grad and vmap."""
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss_of(parameters, x, y):
        prediction = functional_call(model, (parameters, buffers), (x,))
        return (prediction - y).pow(2).mean()

    per_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
    for step in range(10):
        x = torch.randn(64, 6)
        gradients, losses = per_sample(parameters, x, x.prod(1, keepdim=True))
        for name, value in gradients.items():
            norms = value.flatten(1).norm(dim=1).clamp(min=1.0)
            clipped = value / norms.view(-1, *[1] * (value.dim() - 1))
            parameters[name] = parameters[name] - 0.05 * clipped.mean(0)
        print(step, repr(losses.mean().item()))


def inference_only():
    """No training at all: a model in eval mode under inference_mode."""
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2352, 10)]
    model = nn.Sequential(*layers).eval()
    with torch.inference_mode():
        for batch in range(8):
            probabilities = model(torch.randn(8, 3, 16, 16)).softmax(1)
            print(batch, repr(probabilities.max().item()))


if __name__ == "__main__":
    torch.manual_seed(9)
    globals()[sys.argv[1]]()
