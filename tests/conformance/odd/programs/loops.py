"""Training loops of unusual shape, one function a case."""

import copy
import os
import sys

import in_turn
import torch
from torch import nn
from training import STEPS, Model, make, step, train


def batches(count=STEPS):
    return [torch.randn(8, 16) for _ in range(count)]


def lbfgs():
    model, _ = make()
    model.eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for number, batch in enumerate(batches()):

        def closure():
            optimizer.zero_grad()
            loss = model(batch).square().mean()  # noqa: B023
            loss.backward()
            return loss

        print(number, optimizer.step(closure).item().hex())


def closure_fails():
    model, optimizer = make()
    for number, batch in enumerate(batches()):

        def closure():
            if number == 2:  # noqa: B023
                raise ValueError("in a closure")
            optimizer.zero_grad()
            loss = model(batch).square().mean()  # noqa: B023
            loss.backward()
            return loss

        try:
            print(number, optimizer.step(closure).item().hex())
        except ValueError as error:
            print(number, error)


def adversarial():
    torch.manual_seed(0)
    maker, judge = Model(), Model()
    one = torch.optim.Adam(maker.parameters(), 1e-2)
    other = torch.optim.RMSprop(judge.parameters(), 1e-2)
    for number, batch in enumerate(batches(8)):
        made = maker(batch).repeat(1, 4)
        other.zero_grad()
        loss = judge(made.detach()).mean() - judge(batch).mean()
        loss.backward()
        other.step()
        one.zero_grad()
        second = -judge(made).mean()
        second.backward()
        one.step()
        print(number, loss.item().hex(), second.item().hex())


def no_optimizer():
    model, _ = make()
    for number, batch in enumerate(batches()):
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        print(number, loss.item().hex())


def no_module():
    torch.manual_seed(0)
    weight = torch.randn(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    for number, batch in enumerate(batches()):
        loss = (batch @ weight).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex())


def accumulates():
    model, optimizer = make()
    for number, batch in enumerate(batches(12)):
        loss = model(batch).square().mean() / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        print(number, loss.item().hex())


def optimizer_made_again():
    model, _ = make()
    for number in range(6):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        print(number, step(model, optimizer).hex())


def model_replaced():
    for number in range(6):
        if number % 2 == 0:
            model, optimizer = make(number)
        print(number, step(model, optimizer).hex())


def nothing_to_do():
    model, optimizer = make()
    for _ in range(4):
        optimizer.step()
    torch.optim.SGD([torch.zeros(0, requires_grad=True)], 0.1).step()
    print(model(torch.zeros(0, 16)).shape)
    for number in range(4):
        print(number, step(model, optimizer).hex())


def backward_twice():
    model, optimizer = make()
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            print(str(error)[:60])
        print(number, loss.item().hex(), model.head.weight.grad.sum().item().hex())


def penalised():
    model, optimizer = make()
    for number, batch in enumerate(batches()):
        batch.requires_grad_()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + (gradient.norm(2) - 1) ** 2).backward()
        optimizer.step()
        print(number, loss.item().hex(), gradient.sum().item().hex())


def in_backward():
    model, _ = make()
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(
            lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
        )
    for number, batch in enumerate(batches()):
        loss = model(batch).square().mean()
        loss.backward()
        print(number, loss.item().hex())


def own_optimizer():
    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])

    class Around:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    model, _ = make()
    optimizer = Around(Signs(model.parameters()))
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), len(optimizer.state))


def scheduled():
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    average = torch.optim.swa_utils.AveragedModel(model)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), schedule.get_last_lr())
        schedule.step()
        average.update_parameters(model)
    print(average(torch.ones(1, 16)).sum().item().hex())


def freezes():
    model, optimizer = make()
    for number in range(6):
        model.blocks[0].requires_grad_(number % 2 == 0)
        if number == 3:
            model.extra = nn.Linear(4, 4)
            optimizer.add_param_group({"params": model.extra.parameters()})
        print(number, step(model, optimizer).hex(), len(optimizer.param_groups))


def data_replaced():
    model, optimizer = make()
    for number in range(STEPS):
        model.head.weight.data = model.head.weight.data.clone().mul_(0.5)
        model.blocks[0].up.weight.untyped_storage().resize_(model.blocks[0].up.weight.untyped_storage().nbytes())
        model.to(torch.float64).to(torch.float32)
        print(number, step(model, optimizer).hex())


def twins():
    model, optimizer = make()
    for number in range(STEPS):
        teacher = copy.deepcopy(model).eval()
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 16))
        print(number, step(model, optimizer).hex(), wanted.sum().item().hex())
    model.share_memory()
    print(model.head.weight.is_shared(), step(model, optimizer).hex())


def evaluates():
    model, optimizer = make()
    for number in range(3):
        with torch.no_grad():
            print("before", model(torch.ones(4, 16)).sum().item().hex())
        print(number, step(model, optimizer).hex())
        model.eval()
        with torch.no_grad():
            print("after", model(torch.ones(4, 16)).sum().item().hex())
        model.train()


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    model, optimizer = make()
    for number, batch in enumerate(batches()):
        hidden = batch.requires_grad_()
        for position, block in enumerate(model.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=position == 0)
        loss = model.head(hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex())


def frozen_steps():
    """Steps whose backward raises, steps that are skipped, and a loop that ends in the middle of one."""
    model, optimizer = make()
    for number, batch in enumerate(batches(8)):
        loss = model(batch).square().mean()
        if number % 3 == 1:
            continue
        optimizer.zero_grad()
        loss.backward()
        if number == 6:
            break
        optimizer.step()
        print(number, loss.item().hex())


def distributed():
    import torch.distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.FileStore(os.path.abspath("store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model, _ = make()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex())
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        print(total.item())
    torch.distributed.destroy_process_group()
    os.unlink("store") if os.path.exists("store") else None


def rank():
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    model, _ = make()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [step(model, optimizer).hex() for _ in range(STEPS)]
    with open(f"rank{torch.distributed.get_rank()}.txt", "w") as file:
        print(losses, file=file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    in_turn.call(globals())
