"""Which operators a job's code may give tensors of another type is read off its source."""

from __future__ import annotations

from memprof.trace.assemble.source.autocast_types import find_own_casts
from memprof.trace.schema import NONE, Ops, Stacks

SOURCE = """\
class Norm(Module):
    def normalize(self, x):
        return x * rsqrt(x.pow(2).mean(-1))

    def forward(
        self, x
    ):
        return self.normalize(
            x.float()
        )


class Attention(Module):
    def forward(self, x):
        scores = self.query(x)

        return softmax(scores, -1)


def narrow(x):
    return softmax(x, -1, dtype=x.dtype)
"""


def casts(*stacks: str) -> tuple[int, ...]:
    """Returns the ids of those stacks whose code may cast."""
    ids = list(range(len(stacks)))
    ops = Ops.of(op_id=[*ids, len(ids)], stack_id=[*ids, NONE], name=["aten.mul.Tensor"] * (len(ids) + 1))
    return find_own_casts(ops, Stacks.of(stack_id=ids, frames=list(stacks)))


def test_functions_that_name_a_type_may_cast(tmp_path):
    """The function that calls torch, and a caller that hands it a cast tensor; not a neighbour in the same file."""
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    inside = "/venv/lib/python3.11/site-packages/torch/nn/functional.py:2209:softmax"
    normalized = f"{path}:3:normalize\n{path}:8:forward\n{inside}"
    attention = f"{inside}\n{path}:17:forward"
    narrowed = f"{inside}\n{path}:21:narrow\n{path}:17:forward"
    assert casts(normalized, attention, narrowed) == (0, 2)


def test_code_that_cannot_be_read_may_cast(tmp_path):
    """A notebook's cell, a file that is gone, a line beyond its end, a file of another kind, and no frame at all."""
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "data.txt").write_text("x = 1\n")
    places = [f"{tmp_path}/{place}:f" for place in ("gone.py:1", "short.py:9", "data.txt:1")]
    assert casts("<ipython-input-1>:1:f", *places, "", f"{tmp_path}/short.py:1:<module>") == (0, 1, 2, 3, 4)
