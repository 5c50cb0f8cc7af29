"""Traces, exports and transforms inside recorded steps: python traces.py [PROGRAM ...]"""

import io
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from training import make, step

warnings.filterwarnings("ignore", category=DeprecationWarning)
programs = {}


def program(function):
    programs[function.__name__] = function
    return function


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))


def data():
    torch.manual_seed(2)
    return torch.randn(6, 4)


def show(*tensors):
    return [tensor.detach().double().sum().item().hex() for tensor in tensors]


class Shape(nn.Module):
    def forward(self, x):
        y = x.reshape(x.shape[0] * 2, -1)
        if x.shape[0] > 3:
            y = y + x.size(1)
        return y.mean() + len(x)


@program
def jit_trace():
    m = net().eval()
    t = torch.jit.trace(m, data())
    return show(t(data())), str(t.graph)


@program
def jit_trace_shape():
    t = torch.jit.trace(Shape(), data())
    return show(t(data())), t.code


@program
def jit_trace_function():
    t = torch.jit.trace(lambda x: (x * 2).relu().sum(0), (data(),))
    return show(t(data())), str(t.graph)


@program
def jit_trace_train():
    m = net()
    t = torch.jit.trace(m, data(), check_trace=False)
    torch.manual_seed(3)
    out = t(data()); out.square().mean().backward()
    return show(out, *[p.grad for p in m.parameters()]), str(t.graph)


@program
def jit_trace_training_module():
    m, o = make()
    t = torch.jit.trace(m.eval(), torch.randn(8, 16))
    out = []
    for i in range(3):
        torch.manual_seed(i); o.zero_grad()
        l = t(torch.randn(8, 16)).square().mean(); l.backward(); o.step(); out.append(l.item().hex())
    return out, t.code


@program
def jit_script():
    t = torch.jit.script(net())
    torch.manual_seed(3)
    out = t(data()); out.square().mean().backward()
    return show(out), str(t.graph)


@program
def jit_trace_lstm():
    torch.manual_seed(0)
    m = nn.LSTM(4, 3, batch_first=True)
    t = torch.jit.trace(m, torch.randn(2, 5, 4))
    return show(t(torch.ones(2, 5, 4))[0]), t.code


@program
def jit_trace_transformer():
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(8, 2, 16).eval()
    t = torch.jit.trace(m, torch.randn(5, 2, 8))
    return show(t(torch.ones(5, 2, 8))), t.code


@program
def jit_trace_conv():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)).eval()
    m(torch.randn(2, 1, 8, 8))
    t = torch.jit.trace(m, torch.randn(2, 1, 8, 8))
    b = io.BytesIO(); torch.jit.save(t, b); b.seek(0)
    return show(torch.jit.load(b)(torch.ones(2, 1, 8, 8))), t.code


@program
def export():
    e = torch.export.export(net().eval(), (data(),))
    return show(e.module()(data())), str(e.graph)


@program
def fx():
    g = torch.fx.symbolic_trace(net())
    torch.manual_seed(3)
    return show(g(data())), g.code


@program
def make_fx_real():
    from torch.fx.experimental.proxy_tensor import make_fx
    g = make_fx(lambda x: F.gelu(x).sum(0))(data())
    return show(g(data())), g.code


@program
def make_fx_fake():
    from torch.fx.experimental.proxy_tensor import make_fx
    g = make_fx(lambda x: F.gelu(x).sum(0), tracing_mode="fake")(data())
    return show(g(data())), g.code


@program
def make_fx_functional():
    from torch.fx.experimental.proxy_tensor import make_fx
    def f(x):
        y = x.clone(); y.add_(1); y[0].mul_(2); return y
    g = make_fx(torch.func.functionalize(f))(data())
    return show(g(data())), g.code


@program
def forward_ad():
    import torch.autograd.forward_ad as fw
    with fw.dual_level():
        d = fw.make_dual(data(), torch.ones(6, 4))
        p, t = fw.unpack_dual(net().eval()(d))
    return show(p, t)


@program
def double_backward():
    x = data().requires_grad_(); y = x.pow(3).sum(); g, = torch.autograd.grad(y, x, create_graph=True); g.square().sum().backward()
    return show(x.grad)


@program
def autograd_functional():
    from torch.autograd import functional as A
    return show(A.jacobian(torch.sin, data()[0]), A.hessian(lambda x: x.pow(3).sum(), data()[0]), A.hvp(lambda x: x.pow(3).sum(), data()[0], data()[1])[1], A.jacobian(torch.sin, data()[0], vectorize=True))


@program
def flop_counter():
    from torch.utils.flop_counter import FlopCounterMode
    m = net()
    with FlopCounterMode(display=False) as c: m(data()).sum().backward()
    return c.get_total_flops()


@program
def own_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as fm:
        m = nn.Linear(4, 2); y = m(torch.randn(3, 4)); y.sum().backward()
    f = fm.from_tensor(data())
    with fm: z = f @ f.T
    return str(y.shape), type(m.weight.grad).__name__, str(z)


@program
def stateless():
    m = net().eval(); p = {k: v * 0 for k, v in m.named_parameters()}
    return show(torch.func.functional_call(m, p, data()))


@program
def tensorboard_like_graph():
    g, out = torch.jit._get_trace_graph(net().eval(), (data(),))
    return str(g)


@program
def jit_fork():
    @torch.jit.script
    def g(x): return x.sin()
    @torch.jit.script
    def f(x):
        a = torch.jit.fork(g, x); return torch.jit.wait(a) + 1
    return show(f(data()))


@program
def func_grad():
    return show(torch.func.grad(lambda x: x.sin().sum())(data()))


@program
def func_hessian():
    return show(torch.func.hessian(lambda x: (x ** 3).sum())(data()[0]), torch.func.jacrev(torch.sin)(data()[0]), torch.func.jacfwd(torch.sin)(data()[0]))


@program
def func_vmap():
    return show(torch.vmap(lambda x: x.sin() @ x)(data()), torch.vmap(torch.dot)(data(), data()))


@program
def per_sample_grads():
    m = nn.Linear(4, 2); torch.manual_seed(0); nn.init.normal_(m.weight); nn.init.zeros_(m.bias)
    ps = {k: v.detach() for k, v in m.named_parameters()}
    def loss(p, x): return torch.func.functional_call(m, p, (x.unsqueeze(0),)).square().sum()
    g = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(ps, data())
    return show(*g.values())


@program
def jit_trace_grad_inside():
    def f(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = (x ** 2).sum()
            g, = torch.autograd.grad(y, x)
        return g * 2
    t = torch.jit.trace(f, data())
    return show(t(data())), str(t.graph)


if __name__ == "__main__":
    model, optimizer = make()
    for number in range(5):
        print(number, step(model, optimizer).hex())
        if number == 1:
            for name in sys.argv[1:] or programs:
                print(name, programs[name](), flush=True)
