"""Categories of memory, as stated by the recorder."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from memprof.analysis.report.notes import find_unread
from memprof.analysis.report.report import build_report
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.memory.inventory import Inventory, tensors_in
from memprof.recorder.memory.tensor_memory import gradient_of, outside_span, owned_span, storage_span
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.trace.files.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER
from memprof.trace.store import Trace
from tests.recorder.conftest import Logged, RecordJob
from tests.recorder.recorded import record_script


@pytest.fixture
def inventory(log: Logged) -> Inventory:
    registry = ModuleRegistry(log)
    registry.scan()
    return Inventory(log, registry, OptimizerRounds())


def stated(log: Logged, tensor: torch.Tensor) -> list[tuple[int, str]]:
    """Returns category and name of every fact about a tensor's memory, in order."""
    facts = [fact for fact in log.rows("facts") if fact["address"] == tensor.untyped_storage().data_ptr()]
    names = log.texts("names")
    return [(fact["category"], names[fact["name"]] if fact["name"] >= 0 else "") for fact in facts]


def test_the_span_of_a_tensor_is_that_of_its_storage() -> None:
    """A view of three numbers stands on the ten of its base: 40 bytes."""
    base = torch.zeros(10)
    assert storage_span(base[2:5]) == owned_span(base[2:5]) == (base.data_ptr(), 40)


def test_tensors_without_a_storage_have_no_span() -> None:
    """Sparse, opaque and meta tensors; asking raises nothing."""
    sparse = torch.eye(3).to_sparse()
    opaque = torch.ones(2, 2).to_mkldnn()
    for tensor in (sparse, opaque):
        assert storage_span(tensor) == owned_span(tensor) == (0, 0)
    assert storage_span(torch.empty(3, device="meta"))[0] == owned_span(torch.empty(3, device="meta"))[0] == 0


def test_fake_tensors_have_no_span_and_nobody_is_warned(recwarn: pytest.WarningsRecorder) -> None:
    """They are alive while torch.compile traces a job."""
    with FakeTensorMode():
        fake = torch.ones(4, 4)
    assert storage_span(fake) == owned_span(fake) == (0, 0)
    assert not recwarn.list


DIVIDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from memprof.recorder.memory.tensor_memory import plain_tensors
from memprof.recorder.memory.tensor_memory import storage_span

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = torch.nn.Linear(4, 4)
fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
assert isinstance(layer.weight, DTensor)
assert [storage_span(part) for part in plain_tensors(layer.weight)] == [storage_span(layer.weight.to_local())]
assert storage_span(layer.weight.to_local())[1] == 64
dist.destroy_process_group()
"""


def test_a_divided_parameter_is_its_local_part() -> None:
    """FSDP2 makes parameters DTensors, which name their DeviceMesh among what they are made of."""
    # In a process of its own: torch keeps a tensor of each mesh for good, which other tests would count.
    subprocess.run([sys.executable, "-c", DIVIDED], check=True)


def test_foreign_memory_is_not_the_allocators(tmp_path: Path) -> None:
    """numpy's, a buffer's, a file's and shared memory; nor is memory of no bytes."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(16))
    foreign = [
        torch.from_numpy(np.zeros(4)),
        torch.frombuffer(bytearray(16), dtype=torch.float32),
        torch.from_file(str(path), size=4),
        torch.zeros(4).share_memory_(),
        torch.zeros(0),
    ]
    assert [owned_span(tensor) for tensor in foreign] == [(0, 0)] * 5


def test_tensors_are_found_in_batches() -> None:
    """In lists, tuples, named tuples, dictionaries and dataclasses, nested; in a cycle the search ends."""

    @dataclass
    class Batch:
        ids: torch.Tensor
        rest: Any = None

    Pair = namedtuple("Pair", "a b")
    one, two, three, four = (torch.zeros(n) for n in range(4))
    value = [Batch(one, {"x": (two, "text", 3)}), Pair(three, [four])]
    assert [tensor.numel() for tensor in tensors_in(value)] == [0, 1, 2, 3]
    cycle: list[Any] = [one]
    cycle.append(cycle)
    assert {id(tensor) for tensor in tensors_in(cycle)} == {id(one)}


def test_a_models_memory_is_stated(log: Logged) -> None:
    """Parameters and buffers with their names, gradients with their parameters'."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0](torch.ones(1, 2)).sum().backward()
    registry = ModuleRegistry(log)
    registry.scan()
    Inventory(log, registry, OptimizerRounds()).models()
    assert stated(log, model[0].weight) == [(PARAMETER, "0.weight")]
    assert stated(log, model[1].running_mean) == [(BUFFER, "running_mean")]
    assert stated(log, model[0].weight.grad) == [(GRADIENT, "0.weight")]


def test_an_optimizers_state_is_stated(log: Logged) -> None:
    """Each with its parameter's name and its own key; nested state is found; parameters no model has are stated too."""
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), loose])
    (model(torch.ones(1, 2)) + loose).sum().backward()
    optimizer.step()
    optimizer.state[loose]["nested"] = {"history": [torch.ones(3)]}
    registry = ModuleRegistry(log)
    registry.scan()
    Inventory(log, registry, OptimizerRounds()).optimizer_state(optimizer)
    state = optimizer.state[model.weight]
    assert stated(log, state["exp_avg_sq"]) == [(OPTIMIZER_STATE, "weight.exp_avg_sq")]
    assert stated(log, state["step"]) == [(OPTIMIZER_STATE, "weight.step")]
    assert stated(log, loose) == [(PARAMETER, "")]
    assert stated(log, optimizer.state[loose]["exp_avg"]) == [(OPTIMIZER_STATE, "exp_avg")]
    assert stated(log, optimizer.state[loose]["nested"]["history"][0]) == [(OPTIMIZER_STATE, "history")]


def test_gradients_and_inputs_are_stated(log: Logged, inventory: Inventory) -> None:
    """Gradients when an optimizer is about to use them, inputs from the outermost call's arguments."""
    loose = nn.Parameter(torch.zeros(2))
    loose.grad = torch.ones(2)
    batch = torch.zeros(3)
    inventory.gradients(torch.optim.SGD([loose], lr=1.0))
    inventory.inputs(({"x": [batch]},), {"mask": loose})
    assert stated(log, loose.grad) == [(GRADIENT, "")]
    assert stated(log, batch) == [(INPUT, "")]


def test_what_python_holds_is_written_down(log: Logged, inventory: Inventory) -> None:
    """Every storage once in the list of what is alive, with a guess at its purpose; views share theirs."""
    base = torch.zeros(7)
    view = base[1:]
    parameter = nn.Parameter(torch.zeros(9))
    kept = (parameter * 2).exp()
    remembered: list[torch.Tensor] = []
    inventory.held(remembered.append)
    alive = [row for row in log.rows("alive") if row["address"] == base.data_ptr()]
    assert [row["size_bytes"] for row in alive] == [28]
    assert {category for category, _ in stated(log, base)} == {HELD}
    assert {category for category, _ in stated(log, parameter)} == {PARAMETER}
    assert {category for category, _ in stated(log, kept)} == {ACTIVATION}
    assert sum(tensor is base or tensor is view for tensor in remembered) == 1


def test_gradients_that_another_thread_may_write_are_not_read(record_job: RecordJob) -> None:
    """Those of models called there with gradients on: its backward writes them without the interpreter's lock."""

    def job() -> None:
        torch.manual_seed(0)
        mine, theirs, teacher = nn.Linear(4, 5), nn.Sequential(nn.Linear(4, 6)), nn.Linear(4, 7)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)

        def train(model: nn.Module) -> None:
            model(torch.ones(2, 4)).sum().backward()

        def run() -> None:
            train(theirs)
            with torch.no_grad():
                teacher(torch.ones(2, 4))

        train(teacher)
        for _ in range(4):
            train(mine)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            optimizer.step()
        read.append([gradient_of(model.weight) is not None for model in (mine, theirs[0], teacher)])

    read: list[list[bool]] = []
    record_job(job)
    assert read == [[True, True, True], [True, False, True]]


def test_the_parts_of_a_wrapper_are_stated(log: Logged, inventory: Inventory) -> None:
    """A tensor subclass that wraps plain tensors (DTensor, FP8) has its memory in its parts."""
    from torch.testing._internal.two_tensor import TwoTensor

    one, two = torch.zeros(5), torch.zeros(5)
    inventory.inputs((TwoTensor(one, two),), {})
    assert stated(log, one) == stated(log, two) == [(INPUT, "")]


def test_asking_for_gradients_warns_of_nothing(inventory: Inventory, recwarn: pytest.WarningsRecorder) -> None:
    """A parameter that is not a leaf (made by a parametrization) has no .grad to be asked for."""
    module = nn.Linear(2, 2)
    not_leaf = (module.weight * 2).requires_grad_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.param_groups[0]["params"].append(not_leaf)
    inventory.gradients(optimizer)
    inventory.optimizer_state(optimizer)
    assert not recwarn.list


@pytest.mark.parametrize("skip", [0, 1])
def test_categories_of_a_recorded_step(record_job: RecordJob, skip: int) -> None:
    """Conv, BatchNorm and a linear head with Adam: every byte alive at the step's end is for what it must be for.

    The model is made while it is recorded. Parameters 8*3*3*3 + 2*8 + 8*2 + 2 = 250 floats, buffers 2*8 floats and
    one int64, state twice the parameters and a count for each of 5, gradients as the parameters, the batch 4*3*6*6
    floats and 4 int64 of targets. The parameters that the job left when it ran unrecorded are uncategorized.
    """

    def job() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 2),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters())
        images, targets = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 1, 0])
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    step = record_job(job, skip=skip).step(skip)
    storages = step.storages
    at_end = storages.take(storages.freed_op_id == -1)
    held = {category: at_end.allocated_bytes[at_end.category == category].sum() for category in set(at_end.category)}
    assert held["parameter"] == 250 * 4
    assert held["buffer"] == 16 * 4 + 8
    assert held["gradient"] == 250 * 4
    assert held["optimizer_state"] == 2 * 250 * 4 + 5 * 4
    assert held["input"] == 4 * 3 * 36 * 4 + 4 * 8
    # Beside what other tests of this process may have left.
    unknown = Counter(at_end.allocated_bytes[at_end.category == "unknown"].tolist())
    assert Counter([8 * 27 * 4, 8 * 4, 8 * 4, 16 * 4, 2 * 4]) <= unknown
    names = set(storages.name)
    assert {"0.weight", "1.running_mean", "1.num_batches_tracked", "5.bias", "5.weight.exp_avg"} <= names


def test_optimizer_state_is_known_in_an_evaluation_that_ends_the_job(tmp_path: Path) -> None:
    """After the last update, within a step that never ends: a plan that moves the state has to see it there too."""
    job = """
import torch
model = torch.nn.Linear(64, 64, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(10):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(torch.ones(8, 64))
"""
    trace = record_script(tmp_path, job).trace
    last = trace.step(10)
    assert set(last.ops.phase) == {"evaluation"}
    assert last.storages.requested_bytes[last.storages.category == "optimizer_state"].tolist() == [64 * 64 * 4]


def test_what_frees_a_storage_tells_whose_memory_it_is(tmp_path: Path) -> None:
    """Memory of torch's allocator stays its own when `torch.load` or `numpy` fix its size; what numpy, a buffer of
    Python's, a mapped file or shared memory hold is outside of it. Each tensor is of 1,000 numbers of 4 bytes."""
    torch.save(torch.ones(1000), tmp_path / "one.pt")
    shown = torch.ones(1000)
    shown.numpy()
    for own in (torch.ones(1000), torch.load(tmp_path / "one.pt"), shown):
        assert owned_span(own) == (own.data_ptr(), 4000)
        assert outside_span(own) == (0, 0)
    for other in (
        torch.from_numpy(np.ones(1000, np.float32)),
        torch.frombuffer(bytearray(4000), dtype=torch.float32),
        torch.from_dlpack(np.ones(1000, np.float32)),
        torch.load(tmp_path / "one.pt", mmap=True),
        torch.ones(1000).share_memory_(),
    ):
        assert owned_span(other) == (0, 0)
        assert outside_span(other) == (other.data_ptr(), 4000)


LOADED = """
import copy, torch
from torch import nn
torch.manual_seed(0)
def build():
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(2)])
net = build()
optimizer = torch.optim.Adam(net.parameters())
net(torch.randn(4, 128)).sum().backward()
optimizer.step()
optimizer.zero_grad()
torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
net.load_state_dict(torch.load("run.pt", mmap=True)["model"], assign=True)
optimizer = torch.optim.Adam(net.parameters())
checkpoint = torch.load("run.pt")
optimizer.load_state_dict(checkpoint["optimizer"])
del checkpoint["optimizer"]
average = copy.deepcopy(net.state_dict())
data = torch.randn(400, 128)
spare = build().requires_grad_(False)
for step in range(8):
    net(data[4 * step : 4 * step + 4]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, weight in net.state_dict().items():
        average[name].lerp_(weight, 0.1)
"""


def test_loaded_memory_is_seen_for_what_it_is(tmp_path: Path) -> None:
    """Parameters in a mapped file, 2 * 128*128*4 = 131,072 bytes, and optimizer state as `torch.load` read it, twice
    that and two counts of 4 bytes, are counted as such. The checkpoint's weights and the unused model are named
    with their variables and lines; the average, read in every step, and the data set are not."""
    ended = record_script(tmp_path, LOADED, "--stop")
    report = build_report(Trace.open(ended.path))
    parts = {part.key: part.bytes for part in report.at_peak.by_category.parts}
    assert (parts["parameter"], parts["optimizer_state"]) == (131_072, 2 * 131_072 + 8)
    found = find_unread(Trace.open(ended.path), report.step, report.sources)
    assert {(one.variable, one.place, one.bytes) for one in found} == {
        ("checkpoint", "job.py:15", 131_072),
        ("spare", "job.py:20", 131_072),
    }
    sentences = [note.text for note in report.notes]
    assert all(one.describe() in sentences for one in found)
    dry = record_script(tmp_path, LOADED, "--dry-run", name="dry.memprof")
    assert abs((dry.peak or 0) - (ended.peak or 0)) <= 8  # a kernel's single numbers


CYCLES = """\
import torch
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(256, 256)
        def hook(module, given, made):
            self.seen = True
        self.register_forward_hook(hook)
    def forward(self, x):
        return self.net(x)
for step in range(8):
    net = Own()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    net(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
"""


def test_a_cycle_is_no_variable_to_delete(tmp_path: Path) -> None:
    """Modules of earlier steps that their own hooks refer to are named by their type: `del Own` would free nothing."""
    report = build_report(Trace.open(record_script(tmp_path, CYCLES).path))
    assert any("Memory grows by" in note.text for note in report.notes)
    assert not any("`del " in note.text for note in report.notes)
