"""Libraries' own classes of parameters, such as packed weights, in dry runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_both, record_script

#: As libraries for 4-bit weights do it: a class of parameters made by `_make_subclass`, packed where it is moved.
_JOB = """
import torch
from torch import nn

class Packed(nn.Parameter):
    def __new__(cls, data, scale=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs) if self.scale is not None else self.pack()
        return moved

    def cuda(self, device=None, non_blocking=False):
        return self.to(device="cuda")

    def pack(self):
        scale = self.data.abs().amax()
        packed = (self.data / scale * 7).round().to(torch.int8).flatten()
        return Packed(packed[::2].contiguous(), scale)

class Quantised(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.size = Packed(torch.randn(size, size)), size
        self.low, self.high = nn.Linear(size, 4), nn.Linear(4, size)

    def forward(self, x):
        assert type(self.weight).__name__ == "Packed" and isinstance(self.weight, Packed), type(self.weight)
        whole = self.weight.data.float().repeat(2).view(self.size, self.size) * self.weight.scale
        return x @ whole.detach() + self.high(self.low(x))

model = nn.Sequential(Quantised(64), nn.GELU(), Quantised(64))
for layer in (model[0], model[2]):
    layer.weight = layer.weight.to("cpu")  # packed
assert model[0].weight.dtype == torch.int8, model[0].weight.dtype
model = model.to(DEVICE)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(6):
    loss = model(torch.randn(32, 64, device=DEVICE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_packed_parameter_is_dry_run_as_it_is_trained(tmp_path: Path) -> None:
    """The peak of a dry run on the processor is the recorded one."""
    job = _JOB.replace("DEVICE", "'cpu'")
    real, dry = record_both(tmp_path, job)
    assert dry.returncode == 0, dry.stderr
    assert dry.peak == real.peak


def test_a_packed_parameter_moves_to_a_virtual_device(tmp_path: Path) -> None:
    """It is of its class there, and its bytes are counted on the device."""
    ended = record_script(tmp_path, _JOB.replace("DEVICE", "'cuda'"), "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    storages = ended.step.storages
    is_packed = storages.dtype == "int8"
    assert sorted(set(storages.requested_bytes[is_packed].tolist())) == [64 * 64 // 2]


#: As libraries for 4-bit weights do it: an operator of their own that unpacks the weight into a temporary.
_UNPACKING = """
import torch

@torch.library.custom_op("bitsandbytes::made_up_product", mutates_args=())
def product(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return rows @ packed.float().repeat(2, 1)

@product.register_fake
def _(rows, packed):
    return rows.new_empty(rows.shape[0], packed.shape[1])

packed = torch.nn.Parameter(torch.zeros(256, 512, dtype=torch.int8), requires_grad=False)
low = torch.nn.Linear(512, 8)
optimizer = torch.optim.AdamW(low.parameters())
for _ in range(6):
    loss = low(product(torch.randn(16, 512), packed)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_weights_unpacked_inside_an_operator_are_counted(tmp_path: Path) -> None:
    """The peak is that of the recording: half the weight in float32, and the whole of it, 512 x 512 numbers."""
    real, dry = record_both(tmp_path, _UNPACKING)
    assert real.peak > 512 * 512 * 4 * 3 // 2
    assert dry.peak == real.peak


#: As accelerate builds a model without memory, and puts weights into it: with the class that each parameter has.
_CLASSES = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
weights = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
for name, parameter in list(model.named_parameters()):
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    kind = type(parameter)
    empty = kind(parameter.to("meta"), **{**vars(parameter), "requires_grad": True})
    assert empty.device.type == "meta" and isinstance(empty, nn.Parameter), empty
    module._parameters[last] = empty
    made = kind(weights[name].to(DEVICE), requires_grad=last == "weight")
    assert made.device.type == DEVICE and isinstance(made, nn.Parameter), made
    module._parameters[last] = made
assert [p.requires_grad for p in model.parameters()] == [True, False, True, False]
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(6):
    loss = model(torch.randn(16, 32, device=DEVICE)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_parameter_is_made_with_the_class_of_another(tmp_path: Path) -> None:
    """It is a parameter of the data and the device given, and the peak is the recorded one."""
    job = _CLASSES.replace("DEVICE", "'cpu'")
    real, dry = record_both(tmp_path, job)
    assert dry.returncode == 0, dry.stderr
    assert dry.peak == real.peak
    card = record_script(tmp_path, _CLASSES.replace("DEVICE", "'cuda'"), "--dry-run", "--device", "rtx4090")
    assert card.returncode == 0, card.stderr


_LAZY = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
model(torch.randn(2, 3, 8, 8))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(16, 3, 8, 8)).pow(2).mean().backward()
    optimizer.step()
"""


def test_lazy_modules_get_their_shapes_from_their_first_call(tmp_path: Path) -> None:
    """Their parameters are fake ones without a shape until then; the peak is that of the run, to the byte."""
    real, dry = record_both(tmp_path, _LAZY)
    assert dry.returncode == 0, dry.stderr
    assert dry.peak == real.peak


def test_lazy_modules_are_moved_to_a_card_before_they_have_shapes(tmp_path: Path) -> None:
    """Moving one reads what the job itself may not: the shape, which is refused as without memprof."""
    job = _LAZY.replace("nn.LazyLinear(10))", "nn.LazyLinear(10)).cuda()").replace("8, 8))", "8, 8, device='cuda'))")
    job = job.replace(
        "model(torch",
        "try:\n    print(model[0].weight.shape)\nexcept RuntimeError as error:\n    print(error)\nmodel(torch",
        1,
    )
    ended = record_script(tmp_path, job, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert "Can't access the shape of an uninitialized parameter" in ended.stdout


#: A class with methods alone, as fastai's pictures: torch returns every result in it.
_PICTURES = """
import torch

class Picture(torch.Tensor):
    pass

model = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    pictures = torch.tensor([[1.0] * 8] * 4).as_subclass(Picture).to(DEVICE) * 2
    result = model(pictures)
    plain = result.as_subclass(torch.Tensor)
    print("CLASSES", isinstance(pictures, Picture), isinstance(result, Picture), isinstance(plain, Picture))
    plain.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_class_with_methods_alone_is_dry_run_as_it_is_trained(tmp_path: Path) -> None:
    """The peak of a dry run on the processor is the recorded one, and results are of the class."""
    real, dry = record_both(tmp_path, _PICTURES.replace("DEVICE", "'cpu'"))
    assert dry.peak == real.peak
    assert "CLASSES True True False" in dry.stdout
    assert "CLASSES True True False" in real.stdout
    card = record_script(tmp_path, _PICTURES.replace("DEVICE", "'cuda'"), "--dry-run", "--device", "rtx4090")
    assert card.returncode == 0, card.stderr
    assert "CLASSES True True False" in card.stdout


#: As MONAI's MetaTensor does it: results take over the fields of the first argument, all at once.
_COPIED_FIELDS = """
import torch
from torch import nn

class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        first = next((each for each in args if isinstance(each, Tagged)), None)
        if isinstance(result, Tagged) and first is not None:
            result.__dict__ = first.__dict__.copy()
        return result

model = nn.Sequential(nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 1)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randn(256, 64).as_subclass(Tagged)
    x.tag = "scan"
    x = x.to(DEVICE)
    y = model(x)
    assert type(y).__name__ == "Tagged" and y.tag == "scan" and y.device == x.device, type(y)
    loss = y.as_subclass(torch.Tensor).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_class_that_replaces_the_fields_of_its_tensors_is_dry_run(tmp_path: Path) -> None:
    """The fake tensor's mode and device are among them, and those copied may be of another device."""
    real, dry = record_both(tmp_path, _COPIED_FIELDS.replace("DEVICE", "'cpu'"))
    assert dry.peak == real.peak
    card = record_script(tmp_path, _COPIED_FIELDS.replace("DEVICE", "'cuda'"), "--dry-run", "--device", "rtx4090")
    assert card.step.memory.device[0] == "cuda:0"


_JAGGED = """
import torch
from torch import nn
torch.manual_seed(0)
layers = nn.Embedding(50, 64), nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8)
model = nn.Sequential(*layers).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    lengths = torch.randint(20, 120, (8,)).tolist()
    rows = [torch.randint(0, 50, (length,)) for length in lengths]
    loss = model(torch.nested.nested_tensor(rows, layout=torch.jagged, device=DEVICE)).values().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_jagged_tensors_are_dry_run(tmp_path: Path) -> None:
    """Step 2, whose batch is drawn as in a real run, has the same peak, but for a few offsets of 24 bytes."""
    real, dry = (each.trace.step(2) for each in record_both(tmp_path, _JAGGED.replace("DEVICE", '"cpu"')))
    assert dry.memory.allocated_bytes.max() == pytest.approx(real.memory.allocated_bytes.max(), abs=48)


def test_jagged_tensors_are_dry_run_on_a_virtual_card(tmp_path: Path) -> None:
    """They report the card as their device, and autograd's engine runs there."""
    dry = record_script(tmp_path, _JAGGED.replace("DEVICE", '"cuda"'), "--dry-run", "--device", "rtx4090")
    assert dry.step.number >= 1
