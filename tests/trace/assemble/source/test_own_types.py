"""Which operators run in float32, or in a weight's type, by a job's code is read off its source."""

from __future__ import annotations

import pytest

from memprof.trace.assemble.source.own_types import OwnTypes, find_own_types, forget_types
from memprof.trace.schema import NONE, Ops, Stacks

TORCH = "/venv/lib/python3.11/site-packages/torch/nn"
SOURCE = """\
class Norm(Module):
    def normalize(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1))

    def forward(self, x):
        output = self.normalize(x.float())
        output = output * self.weight
        return output.type_as(x)


def attention(query, key, value):
    scores = torch.matmul(query, key) * 2
    scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(scores, value)


def scaled(x, kind):
    x = x.to(torch.float32)
    x = x.to(x.device)
    y, z = x * 2, 1
    x = x.to(kind.dtype)
    return x + 1


def kept(x):
    return F.softmax(x.float(), -1)


def drop(x):
    mask = 0.9 + torch.rand(4, dtype=x.dtype)
    return x * torch.rand(4, dtype=torch.float32)


class Adapter(Module):
    def forward(self, x):
        result = self.base(x)
        is_converted = not torch.is_autocast_enabled()
        x = self.cast(x, self.down.weight.dtype)
        return result + self.up(self.down(
            self.drop(x)
        ))


def shortened(x):
    x = x.float() * 2
    x = x.to(torch.bfloat16)
    return x + 1


def long(x):
    return SUM


def downcast(query, value, rate):
    weights = F.softmax(query, -1)
    weights = weights.type(value.dtype)
    weights = F.dropout(weights, p=rate)
    return torch.matmul(weights, value)
"""
PLACES = {
    "normalize": "3:normalize\n{path}:6:forward",
    "normalized from elsewhere": "3:normalize\n{path}:9:other",
    "weight": "7:forward",
    "scores": "12:attention",
    "softmax": "13:attention",
    "product": "14:attention",
    "in float32": "20:scaled",
    "cast back": "22:scaled",
    "no code": "90:gone",
    "kept": "26:kept",
    "mask": "30:drop",
    "other mask": "31:drop",
    "dropout": "40:forward",
    "base": "36:forward",
    "shortened": "47:shortened",
    "long": "51:long",
    "plain softmax": "55:downcast",
    "dropped": "57:downcast",
    "product of it": "58:downcast",
}
WITHIN = {
    "softmax": f"{TORCH}/functional.py:2209:softmax\n",
    "kept": f"{TORCH}/functional.py:2209:softmax\n",
    "dropout": f"{TORCH}/modules/dropout.py:75:forward\n{TORCH}/modules/module.py:1789:_call_impl\n"
    f"{TORCH}/modules/module.py:1775:_wrapped_call_impl\n",
    "plain softmax": f"{TORCH}/functional.py:2209:softmax\n",
    "dropped": f"{TORCH}/functional.py:1425:dropout\n",
    "base": f"{TORCH}/modules/module.py:1789:_call_impl\n{TORCH}/modules/module.py:1775:_wrapped_call_impl\n",
}


@pytest.fixture
def found(tmp_path):
    """Returns the types of the stacks above by their names, on a processor or a device."""
    path = tmp_path / "model.py"
    path.write_text(SOURCE.replace("SUM", "x.float()" + " + x" * 1500))  # a sum too deep to follow
    frames = [WITHIN.get(name, "") + f"{path}:{place.format(path=path)}" for name, place in PLACES.items()]

    def find(*, on_device: bool = False) -> OwnTypes:
        forget_types()
        ids = list(range(len(frames)))
        ops = Ops.of(op_id=[*ids, len(ids)], stack_id=[*ids, NONE], name=["aten.mul.Tensor"] * (len(ids) + 1))
        return find_own_types(ops, Stacks.of(stack_id=ids, frames=frames), on_device=on_device)

    yield find
    forget_types()


def names(ids: tuple[int, ...]) -> set[str]:
    return {list(PLACES)[number] for number in ids}


def test_what_the_code_casts_to_float32_runs_in_it(found):
    """Directly, in a function that is given the cast, and through a variable until that is cast back."""
    assert names(found().float32) == {"normalize", "weight", "softmax", "in float32", "kept"}


def test_what_is_cast_back_is_told_apart(found):
    """By the function itself, or by its caller."""
    assert names(found().casts_back) == {"normalize", "weight", "softmax", "in float32"}


def test_tensors_made_in_the_type_of_others(found):
    """The type of x, and not one that is named; casts to it too, of which a prediction drops those of floats."""
    assert names(found().made_like) == {"mask", "softmax"}


def test_what_the_code_casts_to_the_type_of_an_argument(found):
    """It reads the cast; a product casts by itself, and what is cast back from float32 is told apart."""
    assert names(found().in_argument) == {"dropped"}


def test_a_module_given_the_type_of_a_weight_runs_in_it(found):
    """Not where the code looks whether autocast is on, on a device: then it does not cast."""
    assert names(found().weight) == {"dropout"}
    assert not found(on_device=True).weight
