"""Modes of torch and kinds of tensors, one function a case."""

import sys
import warnings

import in_turn
import torch
from torch import nn
from training import STEPS, make, step, train


def anomaly():
    with torch.autograd.detect_anomaly(check_nan=True):
        train()


def anomaly_found():
    model, optimizer = make()
    torch.autograd.set_detect_anomaly(True)
    for number in range(STEPS):
        loss = model(torch.randn(8, 16)).square().mean()
        if number == 2:
            loss = torch.sqrt(loss * 0) * 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), flush=True)


def deterministic():
    torch.use_deterministic_algorithms(True)
    print(torch.utils.deterministic.fill_uninitialized_memory)
    model, optimizer = make()
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), torch.empty(2), torch.empty(2, dtype=torch.int32))


def deterministic_warns():
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, optimizer = make()
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), torch.empty(1).resize_(3).isnan().sum())
        torch.kthvalue(torch.arange(3.0), 1)


def default_dtype():
    torch.set_default_dtype(torch.float64)
    train()
    print(torch.tensor(1.0).dtype)


def default_device():
    torch.set_default_device("cpu")
    train()
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        print(model(torch.ones(2, 4)).device, torch.get_default_device())
    torch.set_default_device(None)


def meta_model():
    with torch.device("meta"):
        model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        model(torch.randn(8, 16, device="meta")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    print(model(torch.ones(1, 16)))


def gradients_off():
    model, optimizer = make()
    for number in range(STEPS):
        torch.set_grad_enabled(number % 2 == 0)
        loss = model(torch.randn(8, 16)).square().mean()
        print(number, loss.requires_grad, torch.is_grad_enabled())
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            print(model(torch.ones(1, 16)).is_inference())


def inference():
    model, _ = make()
    model.eval()
    with torch.inference_mode():
        for number in range(STEPS):
            print(number, model(torch.randn(8, 16)).sum().item().hex())


def scaled():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 16)).square().mean()
        if number == 2:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        print(number, nn.utils.clip_grad_norm_(model.parameters(), 1.0).item().hex(), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


def nested():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        parts = [torch.randn(size, 16) for size in (2, 3, 5)]
        batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
        loss = torch.nested.to_padded_tensor(model(batch), 0.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), batch.is_nested)


def sparse():
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.Adam(head.parameters())]
    matrix = torch.eye(8).to_sparse_csr()
    for number in range(STEPS):
        loss = head(torch.sparse.mm(matrix, table(torch.arange(number, number + 8)))).square().mean()
        loss.backward()
        print(number, loss.item().hex(), table.weight.grad.is_sparse, table.weight.grad.coalesce().values().shape)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def quantised():
    train()
    model, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}, dtype=torch.qint8)
        for number in range(STEPS):
            print(number, small(torch.ones(1, 16)).sum().item().hex())
            packed = torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.quint8)
            print(packed.int_repr(), packed.dequantize())


def complex_numbers():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    optimizer = torch.optim.Adam([weight], 0.1)
    for number in range(STEPS):
        loss = (torch.fft.fft(torch.randn(4, 4)) @ weight).abs().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, loss.item().hex(), weight.conj().is_conj())


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen.append(str(func))
        inner = torch.utils._pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        result = func(*inner[0], **inner[1])
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)


seen = []


def subclass_functions():
    model, optimizer = make()
    for number in range(STEPS):
        batch = torch.randn(8, 16).as_subclass(Tagged)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, type(loss).__name__, float(loss).hex(), len(seen), seen[:9])
        seen.clear()


def subclass_dispatch():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wrapped = Wrapper(model.weight.detach().clone())
        print(number, type(wrapped @ wrapped.t()).__name__, seen)
        seen.clear()


def subclass_parameter():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Tagged))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), type(model.weight).__name__, len(seen))
        seen.clear()


def functions_transformed():
    model, _ = make()
    model.eval()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    for number in range(STEPS):
        batch = torch.randn(8, 16)
        gradients = torch.func.grad(loss)(parameters, batch)
        singles = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
        parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
        print(number, loss(parameters, batch).item().hex(), singles["head.weight"].shape)
    print(torch.func.jacrev(torch.sin)(torch.ones(2)), torch.func.hessian(torch.sum)(torch.ones(2)))


def forward_mode():
    import torch.autograd.forward_ad as forward

    model, optimizer = make()
    for number in range(STEPS):
        with forward.dual_level():
            out = model(forward.make_dual(torch.ones(2, 16), torch.ones(2, 16)))
            print(number, forward.unpack_dual(out).tangent.sum().item().hex())
        step(model, optimizer)


def fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, optimizer = make()
    for number in range(STEPS):
        print(number, step(model, optimizer).hex())
        with FakeTensorMode(allow_non_fake_inputs=True):
            print(nn.Linear(16, 4)(torch.ones(3, 16)).shape)


def parametrized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 4))
    nn.utils.parametrizations.spectral_norm(model[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(STEPS):
        print(number, step(model, optimizer).hex())


def one_thread():
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    print(torch.set_flush_denormal(True))
    train()
    print(torch.get_num_threads(), torch.is_autocast_enabled("cpu"))


def exported():
    model, optimizer = make()
    for number in range(STEPS):
        print(number, step(model, optimizer).hex())
        if number == 2:
            model.eval()
            with torch.no_grad():
                program = torch.export.export(model, (torch.ones(2, 16),))
            print(program.module()(torch.ones(2, 16)).sum().item().hex(), len(program.graph.nodes))
            model.train()


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    torch.manual_seed(0)
    for parameter in small.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(small.parameters(), 0.01)
    for number in range(STEPS):
        print(number, step(small, optimizer).hex())


def symbolic():
    from torch.fx import symbolic_trace
    from torch.fx.experimental.proxy_tensor import make_fx

    model, optimizer = make()
    for number in range(STEPS):
        print(number, step(model, optimizer).hex())
        print(len(symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).graph.nodes))
        print(make_fx(lambda x: x.sin().cos())(torch.ones(2)).code)


if __name__ == "__main__":
    in_turn.call(globals())
