"""Works with tensors of every kind inside recorded steps: python tensor_kinds.py [KIND ...]"""

import sys
import tempfile
import warnings
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils import _pytree
from training import make, step

warnings.simplefilter("ignore")
KINDS = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


def data(*shape):
    torch.manual_seed(2)
    return torch.randn(*(shape or (6, 4)))


@kind
def sparse_coo():
    x = data().relu().to_sparse().requires_grad_()
    y = torch.sparse.mm(x, data(4, 3))
    y.square().sum().backward()
    return y, x.grad.to_dense(), x.coalesce().indices()


@kind
def sparse_embedding():
    table = nn.Embedding(10, 4, sparse=True)
    nn.init.ones_(table.weight)
    update = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 3, 3])).square().sum().backward()
    update.step()
    return table.weight.grad.to_dense(), table.weight


@kind
def sparse_csr():
    x = data().relu().to_sparse_csr()
    return (x @ data(4, 3)), x.to_dense(), x.values()


@kind
def nested_strided():
    x = torch.nested.nested_tensor([data(2, 4), data(3, 4)])
    return nn.functional.linear(x, data(5, 4)).to_padded_tensor(0.0), x * 2


@kind
def nested_jagged():
    x = torch.nested.nested_tensor([data(2, 4), data(3, 4)], layout=torch.jagged, requires_grad=True)
    y = nn.functional.linear(x, data(5, 4)).relu()
    y.values().sum().backward()
    return y.values(), x.grad.values()


@kind
def quantised():
    x = torch.quantize_per_tensor(data(), 0.1, 10, torch.quint8)
    return x.dequantize(), x.int_repr()


@kind
def fake_quantised():
    x = data().requires_grad_()
    torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum().backward()
    return x.grad


@kind
def mkldnn():
    x = data().to_mkldnn()
    return (x + x).to_dense(), torch.relu(x).to_dense()


@kind
def masked():
    from torch.masked import masked_tensor

    x = masked_tensor(data(), data() > 0, requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    return y.get_data(), x.grad.get_data()


@kind
def complex_numbers():
    x = torch.view_as_complex(data(6, 2)).requires_grad_()
    torch.fft.fft(x.conj()).abs().sum().backward()
    return torch.view_as_real(x.grad.resolve_conj()), x.imag, x.conj().resolve_conj().real


@kind
def meta():
    x = torch.empty(3, 4, device="meta")
    return torch.tensor((x @ x.T).shape)


@kind
def inference():
    with torch.inference_mode():
        x = data() * 2
    return x.clone() + 1


@kind
def nothing_in_it():
    x = torch.empty(0, 4, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad, torch.cat([x.detach(), data()]), data()[:0].sum()


@kind
def from_elsewhere():
    of_numpy = torch.from_numpy(numpy.arange(6.0))
    of_buffer = torch.frombuffer(bytearray(range(8)), dtype=torch.uint8)
    of_dlpack = torch.from_dlpack(of_numpy)
    of_dlpack += 1
    return of_numpy, of_buffer + 1, of_dlpack, torch.as_tensor(numpy.ones(3)) * 2


@kind
def shared_and_mapped():
    shared = data().share_memory_()
    shared.mul_(2)
    with tempfile.TemporaryDirectory() as folder:
        mapped = torch.from_file(str(Path(folder, "numbers")), shared=True, size=8)
        mapped.fill_(3)
        torch.save(data(), Path(folder, "saved.pt"))
        loaded = torch.load(Path(folder, "saved.pt"), mmap=True)
        return shared, mapped + 1, loaded * 2


@kind
def resized_and_swapped():
    x = data()
    x.resize_(3, 3)
    y = data()
    y.untyped_storage().resize_(0)
    z = data().requires_grad_()
    z.data = torch.ones(2, 2)
    torch.utils.swap_tensors(x, w := torch.zeros(2))
    return x, w, z, torch.as_strided(data(), (2, 2), (1, 3))


class Named(torch.Tensor):
    """A subclass in name."""


class Counting(torch.Tensor):
    """A subclass with a rule for functions."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A wrapper with a rule for operators."""

    seen = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        args, kwargs = _pytree.tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return _pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@kind
def subclass_in_name():
    x = data().as_subclass(Named)
    y = (x * 2).sum(0)
    assert type(y) is Named
    p = nn.Parameter(x)
    (p * 2).sum().backward()
    return y, p.grad


@kind
def subclass_for_functions():
    Counting.calls = 0
    x = data().as_subclass(Counting).requires_grad_()
    (x * 2).relu().sum().backward()
    return x.grad, torch.tensor(Counting.calls)


@kind
def subclass_for_operators():
    Wrapped.seen.clear()
    x = Wrapped(data()).requires_grad_()
    (x @ x.T).relu().sum().backward()
    print(Wrapped.seen)
    return x.grad.inner


@kind
def two_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(data(), data() + 1).requires_grad_()
    nn.functional.linear(x, data(3, 4)).sum().backward()
    return x.grad.a, x.grad.b


@kind
def logging_tensors():
    from torch.testing._internal.logging_tensor import LoggingTensor, capture_logs

    with capture_logs() as logs:
        x = LoggingTensor(data()).requires_grad_()
        (x * 2).sum().backward()
    print(logs)
    return x.grad.elem


@kind
def distributed_tensors():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(data(), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(data(3, 4), mesh, [Replicate()])
        nn.functional.linear(x, w).relu().sum().backward()
        found = x.grad.full_tensor(), w.to_local()
        dist.destroy_process_group()
    return found


@kind
def lazily_made():
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    torch.manual_seed(4)
    net(data()).sum().backward()
    return net[0].weight, net[0].weight.grad


@kind
def weight_norm():
    torch.manual_seed(4)
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    net(data()).square().sum().backward()
    return net.parametrizations.weight.original0.grad


def show(value):
    values = value if isinstance(value, tuple) else (value,)
    return [tensor.detach().to_dense().double().sum().item().hex() if not tensor.is_nested else str(tensor) for tensor in values]


if __name__ == "__main__":
    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex())
        if number in (1, 2):
            for name in sys.argv[1:] or KINDS:
                print(name, show(KINDS[name]()), flush=True)
