from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.compress.policy import Compress
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import parse_plan
from memprof.policies.remat import apply as runtime
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.recorder.light.allocators import AllocatorCount
from memprof.recorder.profiler.native import AllocatorTable

WIDTH, BATCH = 64, 256


@pytest.fixture(autouse=True)
def table() -> Iterator[AllocatorTable]:
    """The allocator counts all the while, as in a job that is started under a plan."""
    table, threads = AllocatorTable(), torch.get_num_threads()
    table.switch_on(is_late=True)
    torch.set_num_threads(1)
    yield table
    torch.set_num_threads(threads)
    table.switch_off()


@dataclass(frozen=True)
class Run:
    losses: list[float]
    gradients: list[torch.Tensor | None]
    state: dict[str, torch.Tensor]
    peak_bytes: int
    dropped: int
    again_us: float


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Reads the allocator's count after every operator, remat's own repeats included: it lies below."""

    def __init__(self) -> None:
        super().__init__()
        self._count = AllocatorCount()
        self._count.find()
        self.start = self.highest = self._count.read()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, self._count.read())
        return result


def run(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    policy: Remat | None,
    steps: int = 3,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> Run:
    """Trains a model from its seed; the budget counts from what is allocated before."""
    torch.manual_seed(0)
    with Peak() as peak:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        job = Job(model, [optimizer])
        if policy is not None:
            policy.apply(job)
        try:
            losses = []
            for step in range(steps):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                backward(loss)
                optimizer.step()
                losses.append(loss.item())
                del loss
            active = runtime._runtime
            memory = active.memory if active is not None else None
        finally:
            job.undo()
    return Run(
        losses,
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        {name: value.clone() for name, value in model.state_dict().items()},
        peak.highest - peak.start,
        memory.dropped if memory is not None else 0,
        memory.again_us if memory is not None else 0.0,
    )


def same(one: Run, other: Run) -> bool:
    """Whether two runs came to the same numbers, bit by bit."""
    return (
        one.losses == other.losses
        and all(
            (a is None and b is None) or torch.equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True)
        )
        and all(torch.equal(one.state[name], other.state[name]) for name in one.state)
    )


def budget(plain: Run, share: float) -> Remat:
    """A budget of a share of a plain run's peak, on top of what the process held before."""
    gc.collect()
    return Remat(budget=str(int(plain.peak_bytes * share) + held_before()), warn_factor=1e9)


def held_before() -> int:
    """What remat will count as allocated before the job begins."""
    from memprof.policies.remat.counters import ProcessorCounter

    counter = ProcessorCounter()
    used = counter.used_bytes()
    counter.close()
    return used


# -- models, each with what is hard in it ----------------------------------------------------------------------------


def tensors(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


class Dropouts(nn.Module):
    """Draws random numbers in and out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.3, inplace=True)
        return x


class Norms(nn.Module):
    """Moves running statistics, activates in place and adds around."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4)
        )
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x):
        x = self.stem(x.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = block(x) + x
        return self.norm(x)


class InPlace(nn.Module):
    """Chains of changes in place, on wholes and on views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y.add_(1.0).mul_(0.5)
            y[:, : WIDTH // 2].tanh_()
            half, rest = y.chunk(2, dim=1)
            x = torch.cat([half.sigmoid(), rest], dim=1).neg_().add_(0.1)
        return x


class Tied(nn.Module):
    """One weight used twice, one tensor saved three times, views of it all over."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.table((x.abs() * 10).long().clamp(max=49)[:, 0])
        for _ in range(5):
            y = self.layer(x)
            x = (y * y.view(2, -1).flip(0).view_as(y)).sin() * y.tanh() + 0.1 * x.t().contiguous().t()
        return x @ self.table.weight.t()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (y + y * x)


class Custom(nn.Module):
    """A function with a backward of its own between plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = Square.apply(torch.tanh(layer(x))) + torch.sigmoid(x)
        return x


class Autocast(nn.Module):
    """Casts of weights and activations, with the cache of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = F.gelu(layer(F.layer_norm(x, (WIDTH,))))
                x = x + self.layers[0](x)
        return x.float()


class Attention(nn.Module):
    """Attention with dropout, and masks made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, dropout=0.2, batch_first=True) for _ in range(3))

    def forward(self, x):
        x = x.view(8, -1, WIDTH)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x


class Lengths(nn.Module):
    """A recurrent cell over as many steps as there are this time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        length = 3 + int(x[0, 0].abs() * 100) % 7
        h = c = torch.zeros(x.shape[0], WIDTH)
        for _ in range(length):
            h, c = self.cell(x, (h, c))
        return h


class Experts(nn.Module):
    """Rows go to one of several experts, as the values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x):
        for _ in range(3):
            weight, chosen = self.gate(x).softmax(1).max(1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]))
            x = x + out * weight[:, None]
        return x


class Tree(nn.Module):
    """Halves are treated by themselves and put together, down to leaves whose number depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, depth=0):
        if depth == 4 or (depth > 2 and float(x.sum()) > 0):
            return torch.tanh(self.leaf(x))
        left, right = self(x.roll(1, 1), depth + 1), self(x * 0.5, depth + 1)
        return torch.tanh(self.join(torch.cat([left, right], 1)))


#: Models, and the shares of their plain peak that are tried. What a function of one's own saves stays.
MODELS = {
    Dropouts: (0.85, 0.7),
    Norms: (0.85, 0.7),
    InPlace: (0.85, 0.75),
    Tied: (0.85, 0.7),
    Custom: (0.95, 0.88),
    Autocast: (0.85, 0.7),
    Attention: (0.85, 0.7),
    Lengths: (0.85, 0.7),
    Experts: (0.85, 0.7),
    Tree: (0.85, 0.7),
}


def squares(model: nn.Module, step: int) -> torch.Tensor:
    return model(tensors(step, BATCH, WIDTH)).pow(2).mean()


# -- numbers and budgets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("heuristic", ["eq-class", "msps"])
def test_numbers_are_those_of_the_plain_run_and_the_budget_holds(make, heuristic):
    """Losses, gradients, parameters and running statistics are equal to the bit, and no byte is above the budget."""
    plain = run(make, squares, None)
    for share in MODELS[make]:
        policy = budget(plain, share)
        within = run(make, squares, Remat(budget=policy.budget, heuristic=heuristic, warn_factor=1e9))
        assert same(plain, within)
        assert within.dropped > 0
        assert within.peak_bytes <= plain.peak_bytes * share


def test_an_outer_graph_outlives_an_update():
    """Parameters change while a graph that was made from their old values is kept: what it dropped comes from those."""

    def late(model, step):
        x = tensors(step, BATCH, WIDTH)
        bias = model.layers[0].bias
        early = torch.tanh(x + bias) * torch.sigmoid(x + bias)  # saves sums, whose recipes read the bias
        loss = squares(model, step)
        loss.backward()
        with torch.no_grad():
            bias.add_(0.5)
        return early.pow(2).mean()

    plain = run(Dropouts, late, None)
    within = run(Dropouts, late, budget(plain, 0.8))
    assert same(plain, within)
    assert within.dropped > 0


def test_checkpointed_regions_stay_checkpointed():
    """Activation checkpointing inside a budget: the numbers stay, and what the regions take in can be dropped."""
    plain = run(Dropouts, squares, None)
    policy = budget(plain, 0.6)
    torch.manual_seed(0)
    model = Dropouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job(model, [optimizer])
    Plan((Checkpoint(modules=("layers.[1-4]",)), policy)).apply(job)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = squares(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    job.undo()
    assert losses == plain.losses


def test_victims_are_carried_to_disk_where_that_is_quicker():
    """With swap, the numbers and the budget are the same, and copies take the place of second runs."""
    plain = run(Attention, squares, None)
    policy = budget(plain, 0.7)
    within = run(Attention, squares, Remat(budget=policy.budget, swap="disk", warn_factor=1e9))
    assert same(plain, within)
    assert within.dropped > 0
    assert within.peak_bytes <= plain.peak_bytes * 0.7


def test_what_kernels_take_is_heard_through_a_recorders_session(tmp_path):
    """One profiler runs at a time: while a recorder's does, estimates are used until its events are read."""
    from memprof.policies.remat.cells import Need
    from memprof.policies.remat.counters import ProcessorCounter
    from memprof.policies.remat.needs import Needs
    from memprof.recorder.log import RawLog
    from memprof.recorder.profiler.native import NativeEvents
    from memprof.trace.files.spool_writer import SpoolWriter

    convolution, counter = torch.ops.aten.convolution.default, ProcessorCounter()
    args = (torch.randn(4, 16, 32, 32), torch.randn(16, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution(*args)  # what a first run sets up for good is not the kernel's
    needs, later = Needs(counter, torch.device("cpu")), Needs(counter, torch.device("cpu"))
    alone, beside, again, copying = (Need() for _ in range(4))
    needs.learn(alone, 1, convolution, args, {})
    assert alone.is_measured
    later.begin()
    session = NativeEvents(RawLog(SpoolWriter(tmp_path)))
    assert session.start()
    later.learn(beside, 1 << 30, convolution, args, {})
    assert not beside.is_measured
    assert beside.highest_bytes >= 1 << 30
    transposed = torch.randn(64, 32).t()
    later.learn(copying, 0, torch.ops.aten._softmax.default, (transposed, -1, False), {})
    session.cut()
    assert copying.highest_bytes == 2 * transposed.nbytes  # a copy of its operand, and the result
    assert beside.is_measured
    assert beside.highest_bytes == alone.highest_bytes >= 4 * 16 * 32 * 32 * 4
    later.learn(again, 1 << 30, convolution, args, {})
    later.end()
    session.stop()
    assert not again.is_measured
    counter.close()


def test_kernels_are_measured_for_each_layout_and_number():
    """What a kernel needs is looked up by its operator and by the layouts, types and whole numbers that it is given."""
    model = Dropouts()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    Remat(budget="64GiB").apply(job)
    assert runtime._runtime is not None
    sequence = runtime._runtime.memory.sequence

    def need(function, *args):
        with torch.no_grad():
            function(*args)
        return sequence.position.kind.need

    small, large = torch.zeros(4, 4), torch.zeros(8, 8)
    try:
        product = need(torch.mm, small, small)
        assert need(torch.mm, torch.ones(4, 4), small) is product
        assert need(torch.mm, large, large) is not product
        assert need(torch.mm, small.double(), small.double()) is not product
        assert need(torch.mm, small.t(), small) is not product
        assert need(torch.cumsum, small, 0) is not need(torch.cumsum, small, 1)
        assert need(torch.roll, small, [1], [0]) is not need(torch.roll, small, [1], [1])
        assert need(torch.roll, small, [1], [0]) is need(torch.roll, small, [1], [0])
    finally:
        job.undo()


# -- what a plan names -----------------------------------------------------------------------------------------------


def test_a_plan_names_what_is_made_again():
    """Without a budget exactly the tensors named by keys are dropped, each as soon as it has no other reference."""
    plain = run(Norms, squares, None)
    keys = tuple(f"blocks.{block}.1:aten.native_batch_norm.default:0" for block in range(4))
    named = run(Norms, squares, Remat(recompute=keys))
    assert same(plain, named)
    assert named.dropped == 24  # mean and deviation; relu changes the rest in place, so that nobody keeps it
    keys = tuple(f"blocks.{block}.0:aten.convolution.default:0" for block in range(1, 4))
    named = run(Norms, squares, Remat(recompute=keys))
    assert same(plain, named)
    assert named.dropped == 9  # three convolutions a step
    assert named.peak_bytes < plain.peak_bytes


def test_a_plan_for_another_model_is_refused():
    """A key that names a module the model lacks is refused, and nothing is changed."""
    model = Dropouts()
    with pytest.raises(PolicyError, match=r"another model: .*'blocks.0'"):
        Remat(recompute=("blocks.0:aten.gelu.default:0",)).apply(Job(model))
    assert runtime._runtime is None


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_budget_that_nothing_can_hold_says_what_is_missing():
    """Below the least working set the sentence names the operator, its bytes, and a budget that would do."""
    plain = run(Dropouts, squares, None)
    sentence = r"remat cannot stay within .*: aten\.\S+ needs .* at once .* Set a budget of .* or more"
    with pytest.raises(PolicyError, match=sentence):
        run(Dropouts, squares, budget(plain, 0.2))
    assert runtime._runtime is None
    assert same(plain, run(Dropouts, squares, None))


def test_a_suggested_budget_that_nothing_can_hold_is_exceeded_with_one_warning():
    """A step that needs more than those a plan was made for does not end the job, and its numbers stay."""
    plain = run(Dropouts, squares, None)
    policy = replace(budget(plain, 0.2), exceeds=True)
    with pytest.warns(RuntimeWarning, match=r"goes over its budget of .*: aten\.\S+ needs") as caught:
        held = run(Dropouts, squares, policy)
    assert len([w for w in caught if "goes over" in str(w.message)]) == 1
    assert same(plain, held)


def test_saved_tensors_that_were_changed_are_refused_as_by_pytorch():
    """Changing in place what backward needs gives PyTorch's own error, dropped or not."""

    def spoilt(model, step):
        y = model(tensors(step, BATCH, WIDTH))
        z = y.sigmoid()
        loss = z.pow(2).mean()
        z.add_(1.0)
        return loss

    messages = []
    plain = run(Dropouts, squares, None)
    for policy in (None, Remat(budget="8GiB"), budget(plain, 0.8)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            run(Dropouts, spoilt, policy)
        messages.append(str(caught.value).partition(": [")[0])
    assert len(set(messages)) == 1


def test_an_error_in_a_second_run_is_the_jobs_own():
    """What an operator raises when it runs again reaches the job as it is, and the next backward works."""
    calls = []

    @torch.library.custom_op("memprof_tests::fragile", mutates_args=())
    def fragile(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("only once")
        return x * 2

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x) * fragile(x)

    torch.manual_seed(0)
    model = Fragile()
    job = Job(model)
    Remat(recompute=(":memprof_tests.fragile.default:0",)).apply(job)
    loss = model(tensors(0, BATCH, WIDTH)).sum()
    with pytest.raises(ValueError, match="only once"):
        loss.backward()
    memory = runtime._runtime.memory
    assert all(cell.locks == 0 for cell in memory.cells.values())
    model.zero_grad()
    del loss
    model(tensors(0, BATCH, WIDTH)).sum().backward()
    assert len(calls) == 4
    assert model.layer.weight.grad is not None
    job.undo()


def test_compiled_models_are_refused():
    """torch.compile hides its operators: the sentence says to leave one of the two out."""
    model = Dropouts()
    with pytest.raises(PolicyError, match=r"compiled by torch\.compile"):
        Remat(budget="1GiB").apply(Job(torch.compile(model)))
    model.compile()
    with pytest.raises(PolicyError, match=r"compiled by torch\.compile"):
        Remat(budget="1GiB").apply(Job(model))
    job = Job(Dropouts())
    with pytest.raises(PolicyError, match=r"torch\.compile has compiled"):
        Plan((Compile(modules=("layers.0",)), Remat(budget="1GiB"))).apply(job)


def test_two_policies_on_what_is_saved_are_refused():
    """compress and swap replace what is saved, too: one of them at a time."""
    with pytest.raises(PolicyError, match="two policies"):
        Plan((Compress(), Remat(budget="1GiB"))).apply(Job(Dropouts()))


def test_a_process_has_one_budget():
    """Several models of a job share it; another budget is refused; with the last of them it ends."""
    first, second = Job(Dropouts()), Job(Norms())
    Remat(budget="1GiB").apply(first)
    Remat(budget="1GiB").apply(second)
    with pytest.raises(PolicyError, match="another budget"):
        Remat(budget="2GiB").apply(Job(Tied()))
    first.undo()
    assert runtime._runtime is not None
    second.undo()
    assert runtime._runtime is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_much_work_done_twice_is_warned_of():
    """Past the stated multiple of the forward's time the job is warned once, with a remedy."""
    plain = run(Dropouts, squares, None)
    policy = Remat(budget=budget(plain, 0.6).budget, warn_factor=1e-6)
    with pytest.warns(RuntimeWarning, match="a larger budget") as caught:
        run(Dropouts, squares, policy)
    assert len([w for w in caught if "remat" in str(w.message)]) == 1


def test_it_adds_itself_below_the_jobs_own_hooks_and_modes():
    """Applied in the middle of the job's own contexts, it leaves with them in their order."""
    job = Job(Dropouts())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t), Peak():
        Remat(budget="1GiB").apply(job)
        squares(job.model, 0).backward()
    assert packed
    assert torch._C._len_torch_dispatch_stack() == 1
    job.undo()
    assert torch._C._len_torch_dispatch_stack() == 0


# -- theory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 64, 256])
def test_a_chain_within_its_root_runs_each_layer_a_few_times(length):
    """N layers under a budget of about 4 sqrt(N) activations take O(N) runs: a bounded number for each layer."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            for _ in range(length):
                x = torch.sin(x) * self.weight
            return x

    activation = BATCH * WIDTH * 4
    gc.collect()
    size = held_before() + int((4 * length**0.5 + 10) * activation)
    counted = []
    again = runtime.Recomputation._run

    def count(self, recipe, args, kwargs):
        counted.append(recipe)
        return again(self, recipe, args, kwargs)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(runtime.Recomputation, "_run", count)
        run(Chain, squares, Remat(budget=str(size)), steps=1)
    assert len(counted) <= 6 * 2 * length


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_without_sense_are_refused():
    """Each sentence says what to write."""
    for settings, sentence in (
        ({}, "budget = '8GiB'"),
        ({"budget": "a lot"}, "not a size"),
        ({"budget": "0"}, "positive budget"),
        ({"budget": "1GiB", "heuristic": "lru"}, "eq-class or msps"),
        ({"budget": "1GiB", "swap": "tape"}, "host or disk"),
        ({"budget": "1GiB", "warn_factor": 0.0}, "warn_factor = 2.0"),
        ({"recompute": ("layers.0",)}, "module, operator and number"),
    ):
        with pytest.raises(PolicyError, match=sentence):
            Remat(**settings)


def test_the_flag_and_the_plan_file_say_the_same():
    """``--remat 8GiB:disk`` is ``[remat]`` with a budget and swap."""
    policy = Remat.from_flag("8GiB:disk")
    assert policy == Remat(budget="8GiB", swap="disk")
    assert parse_plan('[remat]\nbudget = "8GiB"\nswap = "disk"\n').policies == (policy,)
    assert policy.describe() == "remat within 8.00 GiB, swap to disk if faster"
    with pytest.raises(PolicyError, match="--remat 8GiB"):
        Remat.from_flag(":disk")
