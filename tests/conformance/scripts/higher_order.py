"""Trains through higher-order operators, eager or compiled: python higher_order.py [--no-collection] PART ..."""

import gc
import sys
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")  # torch says of some of these that they are prototypes


def cond(y):
    return torch.cond(y.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (y,))


def cond_of_cond(y):
    def inner(a):
        return torch.cond(a.mean() > 0.1, lambda b: b * 3, lambda b: b.tanh(), (a,))

    return torch.cond(y.sum() > 0, inner, lambda a: a.cos(), (y,))


def while_loop(y):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), y))[1]


def scan(y):
    from torch._higher_order_ops.scan import scan

    carry, rows = scan(lambda c, x: ((c + x).sin(), (c * x).cos()), torch.zeros(16), y)
    return rows + carry


def associative_scan(y):
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a + b.sin(), y, 0, combine_mode="generic")


def over_rows(y):
    from torch._higher_order_ops.map import map as map_rows

    return map_rows(lambda row, k: row.sin() * k, y, torch.tensor(2.0))


def subgraph(y):
    from torch._higher_order_ops.invoke_subgraph import mark_compile_region

    part = mark_compile_region(lambda a: a.sin() * 2)
    return part(part(y))


def out_dtype(y):
    from torch._higher_order_ops.out_dtype import out_dtype

    whole = torch.arange(16, dtype=torch.int8).reshape(4, 4)
    return y + out_dtype(torch.ops.aten.mm.default, torch.int32, whole, whole).float().mean()


def flex_attention(y):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with torch.no_grad():  # which torch has no backward of on a processor
        q = y.detach()[:2].reshape(1, 2, 4, 4)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
        near = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j), block_mask=mask)
    return y + near.sum()


def random_state(y):
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    with torch.no_grad():
        state, first = run_and_save_rng_state(torch.ops.aten.bernoulli.p, y.detach(), 0.5)
        again = run_with_rng_state(state, torch.ops.aten.bernoulli.p, y.detach(), 0.5)
    assert torch.equal(first, again)
    return y * first


@torch.library.custom_op("memprof_test::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def functionalized(y):
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    with torch.no_grad():
        _, more = auto_functionalized(torch.ops.memprof_test.add_one.default, x=y.detach())
    return y * more


class Opaque(torch._ops.HigherOrderOperator):
    """One that nobody but this script has seen."""

    def __init__(self):
        super().__init__("opaque_of_the_job")

    def __call__(self, function, x):
        return super().__call__(function, x)


opaque_operator = Opaque()
opaque_operator.fallthrough(torch._C.DispatchKey.AutogradCPU)
opaque_operator.py_impl(torch._C.DispatchKey.CPU)(lambda function, x: function(x))


def opaque(y):
    with torch.no_grad():
        return y * opaque_operator(lambda a: (a.sin() + 1).contiguous(), y.detach())


def prints(y):
    torch._higher_order_ops.print("part {}", 1)
    return y


def attention(y):
    q = y.reshape(1, 2, 4, 16)
    return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2).reshape(8, 16)


def compiled_checkpoint(y):
    return checkpoint(attention, y, use_reentrant=False)


def fails(y, *, operator):
    def branch(a):
        if STEP == 2:
            raise ValueError("the job's own error, inside a function of the operator")
        return a.sin()

    with torch.no_grad():
        return y * operator(branch, y.detach())


def fails_followed(y):
    from torch._higher_order_ops.strict_mode import strict_mode_op

    return fails(y, operator=lambda branch, a: strict_mode_op(branch, (a,)))


def fails_opaque(y):
    return fails(y, operator=opaque_operator)


COMPILED = {"compiled_checkpoint": "aot_eager", "compiled_cond": "aot_eager", "inductor_checkpoint": "inductor"}
compiled_cond, inductor_checkpoint = cond, compiled_checkpoint


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.body = globals()[name]
        if name in COMPILED:
            self.body = torch.compile(self.body, backend=COMPILED[name])

    def forward(self, x):
        return self.last(self.body(self.first(x)))


PARTS = [word for word in sys.argv[1:] if word != "--no-collection"]
if len(PARTS) < len(sys.argv[1:]):
    gc.disable()
torch.manual_seed(0)
models = nn.ModuleDict({name: Model(name) for name in PARTS})
optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
for STEP in range(5):
    optimizer.zero_grad()
    for name, model in models.items():
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        print(STEP, name, loss.item().hex(), flush=True)
    optimizer.step()
