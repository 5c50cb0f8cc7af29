"""Hooks, modes and patches of a program's own, one function a case."""

import collections
import functools
import sys
import types

import in_turn
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import STEPS, make, step, train


def global_module_hooks():
    calls = collections.Counter()
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda m, i: calls.update([f"pre {type(m).__name__}"])),
        nn.modules.module.register_module_forward_hook(lambda m, i, o: calls.update([f"post {type(m).__name__}"])),
        nn.modules.module.register_module_full_backward_hook(lambda m, i, o: calls.update([f"back {type(m).__name__}"])),
    ]
    train()
    for handle in handles:
        handle.remove()
    print(sorted(calls.items()))
    print(len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks))


def module_hooks():
    model, optimizer = make()
    seen = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda m, a, k: seen.append("pre") or ((a[0] * 2,), k), with_kwargs=True)
    block.register_forward_hook(lambda m, a, o: seen.append("post") or o + 1, always_call=True)
    block.register_full_backward_pre_hook(lambda m, g: seen.append("back pre") or (g[0] * 2,))
    block.register_full_backward_hook(lambda m, i, o: seen.append("back") or (i[0] / 2,))
    model.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), seen, len(model.state_dict()))
        seen.clear()


def hooks_removed_inside():
    model, optimizer = make()
    handles = {}

    def once(module, inputs, output):
        handles.pop(module).remove()
        print("once", type(module).__name__)

    for number in range(STEPS):
        handles[model.head] = model.head.register_forward_hook(once)
        handles[model.blocks] = model.blocks.register_forward_hook(once)
        print(number, step(model, optimizer).hex(), len(model.head._forward_hooks))


def hook_fails():
    model, optimizer = make()

    def fail(*_):
        if number == 2:
            raise ValueError("in a hook")

    model.head.register_full_backward_hook(fail)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), flush=True)


def tensor_hooks():
    model, optimizer = make()
    seen = []
    model.head.weight.register_hook(lambda g: g * 0.5)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item().hex()))
    for number in range(STEPS):
        hidden = model.blocks(torch.randn(8, 16))
        hidden.retain_grad()
        hidden.register_hook(lambda g: seen.append(tuple(g.shape)))
        loss = model.head(hidden).square().mean()
        loss.grad_fn.register_hook(lambda i, o: seen.append(len(i)))
        loss.grad_fn.register_prehook(lambda o: seen.append(len(o)))
        torch.autograd.graph.register_multi_grad_hook([hidden, model.head.weight], lambda gs: seen.append(len(gs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), seen, hidden.grad.sum().item().hex())
        seen.clear()


def graph_seen():
    model, optimizer = make()
    for number in range(STEPS):
        loss = model(torch.randn(8, 16)).square().mean()
        node, names = loss.grad_fn, []
        while node is not None:
            names.append((node.name(), sorted(node.metadata)))
            node = node.next_functions[0][0] if node.next_functions else None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, names)


def saved_tensors():
    model, optimizer = make()
    counts = collections.Counter()

    def pack(tensor):
        counts["packed"] += 1
        return tensor.numpy().copy() if not isinstance(tensor, nn.Parameter) else tensor

    def unpack(packed):
        counts["unpacked"] += 1
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

    for number in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: unpack(p)):
            print(number, step(model, optimizer, torch.randn(8, 16)).hex(), sorted(counts.items()))


def saved_on_cpu():
    model, optimizer = make()
    for number in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            print(number, step(model, optimizer).hex())


def saved_hooks_forbidden():
    model, optimizer = make()
    for number in range(STEPS):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            print(number, step(model, optimizer).hex())


def saved_mutated():
    model, optimizer = make()
    for number in range(STEPS):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            hidden = torch.relu(model.blocks(torch.randn(8, 16)))
            loss = model.head(hidden).square().mean()
            hidden.detach().mul_(0)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), model.head.weight.grad.sum().item().hex())


def optimizer_hooks():
    model, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("state"))
    first = torch.optim.optimizer.register_optimizer_step_post_hook(lambda o, a, k: seen.append("global"))
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), seen, len(optimizer.state_dict()))
        seen.clear()
        if number == 2:
            first.remove()
    print(len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))
    print(len(torch.optim.optimizer._global_optimizer_post_hooks))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def dispatch_mode():
    model, optimizer = make()
    for number in range(STEPS):
        with Counting() as outer, Counting() as inner:
            step(model, optimizer)
        print(number, outer.names == inner.names, sorted(inner.names.items()))


def dispatch_mode_for_ever():
    mode = Counting()
    mode.__enter__()
    model, optimizer = make()
    for number in range(STEPS):
        step(model, optimizer)
        print(number, sum(mode.names.values()))


def dispatch_mode_fails():
    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if number == 2 and "mm" in str(func):
                raise ValueError("in a mode")
            return func(*args, **(kwargs or {}))

    model, optimizer = make()
    for number in range(STEPS):
        with Failing():
            print(number, step(model, optimizer).hex(), flush=True)


def function_mode():
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names[getattr(func, "__name__", str(func))] += 1
            return func(*args, **(kwargs or {}))

    model, optimizer = make()
    for number in range(STEPS):
        names = collections.Counter()
        with Functions():
            step(model, optimizer)
        print(number, sorted(names.items()))


def function_mode_for_ever():
    """Entered before there is a model, and never left: what runs in it sees each call of the program's own."""

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names[getattr(func, "__name__", str(func))] += 1
            return func(*args, **(kwargs or {}))

    names = collections.Counter()
    Functions().__enter__()
    model, optimizer = make()
    for number in range(STEPS + 3):
        step(model, optimizer)
        print(number, sum(names.values()))
    print(sorted(names.items()))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.save_for_backward(x)
        ctx.note = note
        ctx.set_materialize_grads(False)
        return x**3, x.detach().clone()

    @staticmethod
    def backward(ctx, gradient, other):
        (x,) = ctx.saved_tensors
        calls.append((ctx.note, other is None, ctx.needs_input_grad))
        return gradient * 3 * x * x, None


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.neg()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.neg()


calls = []


def own_function():
    model, optimizer = make()
    for number in range(STEPS):
        hidden, _ = Cube.apply(model.blocks(torch.randn(8, 16)), number)
        loss = model.head(Flip.apply(hidden)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), calls.pop())


def patched(owner, name, label):
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        calls.append(label)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
    return original


def patches():
    originals = [
        (owner, name, patched(owner, name, name))
        for owner, name in (
            (torch.Tensor, "backward"),
            (torch.optim.AdamW, "step"),
            (torch.optim.Optimizer, "zero_grad"),
            (nn.Module, "__call__"),
            (nn.Module, "_call_impl"),
            (torch.nn.functional, "linear"),
            (torch, "relu"),
            (torch.autograd, "backward"),
            (nn.Module, "__setattr__"),
        )
    ]
    model, optimizer = make()
    calls.clear()
    for number in range(STEPS + 2):
        print(number, step(model, optimizer).hex(), sorted(collections.Counter(calls).items()))
        calls.clear()
        if number == 4:
            for owner, name, original in originals:
                setattr(owner, name, original)
    print(nn.Module.__call__.__name__, torch.optim.AdamW.step.__name__, nn.Module._call_impl.__qualname__)


def patches_in_window():
    model, optimizer = make()
    for number in range(STEPS):
        originals = [(nn.Module, "__call__", patched(nn.Module, "__call__", "call"))]
        originals.append((torch.optim.AdamW, "step", patched(torch.optim.AdamW, "step", "step")))
        print(number, step(model, optimizer).hex(), sorted(collections.Counter(calls).items()))
        calls.clear()
        for owner, name, original in originals:
            setattr(owner, name, original)


def patched_instance():
    model, optimizer = make()
    forward = model.head.forward
    model.head.forward = types.MethodType(lambda self, x: calls.append(1) or forward(x), model.head)
    inner = optimizer.step
    optimizer.step = lambda closure=None: calls.append(2) or inner(closure)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), len(calls))
    del model.head.forward, optimizer.step


def code_seen():
    """What torch's own functions are made of, as those see it that wrap or compare them."""
    import inspect

    model, optimizer = make()
    for _ in range(STEPS):
        step(model, optimizer)
        print(nn.Module.__call__ is nn.Module._wrapped_call_impl, nn.Module.__call__.__module__)
        print(str(inspect.signature(nn.Module._call_impl)), nn.Module._call_impl.__code__.co_filename[-30:])
        print(torch.optim.AdamW.step.__qualname__, inspect.signature(optimizer.step))
        print(type(model).__mro__, type(optimizer).__mro__, sorted(vars(model)), sorted(vars(optimizer)))
        print(inspect.getsource(nn.Module._call_impl) == inspect.getsource(nn.Module._call_impl))


def counts_own_calls():
    """A module that is its own __call__, one that has none, and one called through its class."""

    class Own(nn.Linear):
        def __call__(self, x):
            calls.append("own")
            return super().__call__(x)

    torch.manual_seed(0)
    model = nn.Sequential(Own(16, 16), nn.Identity(), Own(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), len(calls))
        print(nn.Module.__call__(model, torch.ones(1, 16)).sum().item().hex())


if __name__ == "__main__":
    in_turn.call(globals())
