"""Copies of a model under a plan, and files it is saved in: the job's own model, with weights of their own."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from memprof.policies.runtime.job import COPIED, Job
from tests.policies.loops import Loop, Net, each_change, each_forward


def evaluated(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns what a model computes in evaluation."""
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


def saved(thing: Any) -> bytes:
    """Returns the bytes of a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    """Reads them."""
    return torch.load(io.BytesIO(data), weights_only=False)


@each_change
def test_a_copy_is_the_jobs_own_model(loop: Any) -> None:
    """A copy, a pickle and a file of torch.save compute what a model made anew with the weights computes, to the bit.

    Their ``__dict__`` contains nothing that such a model's does not.
    """
    one = loop()
    one.train(batches=2)
    plain = one.plain()
    copies = copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model)), loaded(saved(one.model))
    wanted = evaluated(plain, one.x)
    for duplicate in copies:
        assert torch.equal(evaluated(duplicate, one.x), wanted)
        for mine, others in zip(duplicate.modules(), plain.modules(), strict=True):
            assert vars(mine).keys() == vars(others).keys()
            assert not mine._state_dict_pre_hooks
            assert not mine._load_state_dict_pre_hooks
        assert not any(parameter._backward_hooks for parameter in duplicate.parameters())
        assert not any(getattr(each, "_post_accumulate_grad_hooks", None) for each in duplicate.parameters())
    assert list(one.model.state_dict()) == list(plain.state_dict())


@each_change
def test_a_file_needs_no_memprof(loop: Any) -> None:
    """Nothing that torch.save writes of a model, of an optimizer or of both names anything of memprof's."""
    one = loop()
    one.train(batches=2)
    everything = {"model": one.model, "ema": copy.deepcopy(one.model), "optimizer": one.optimizer, "list": [one.model]}
    for thing in (everything, one.model.state_dict(), one.optimizer.state_dict()):
        assert b"memprof" not in saved(thing)
    assert b"memprof" not in cloudpickle.dumps(one.model.layers)
    again = loaded(saved(everything))
    assert again["list"][0] is again["model"]
    assert again["optimizer"].param_groups[0]["params"][0] is next(again["model"].parameters())


@each_change
def test_what_is_looked_at_is_as_it_was(loop: Any) -> None:
    """Type, signature, documentation and self of forward are the model's own, and undo restores everything."""
    one, plain = loop(), Net()
    forward = one.model.forward
    assert type(one.model) is Net
    assert set(dir(one.model)) == set(dir(plain))
    assert isinstance(forward, types.MethodType)
    assert forward.__self__ is one.model
    assert inspect.signature(forward) == inspect.signature(plain.forward)
    assert inspect.getsource(forward) == inspect.getsource(Net.forward)
    assert forward.__doc__ == "Returns logits."
    one.job.undo()
    for mine, others in zip(one.model.modules(), plain.modules(), strict=True):
        assert vars(mine).keys() == vars(others).keys()


@each_forward
def test_one_note_says_what_a_copy_is(loop: Any) -> None:
    """However many copies are made, the user reads one sentence."""
    one = loop()
    assert COPIED not in one.job.notes
    for _ in range(3):
        copy.deepcopy(one.model)
        saved(one.model)
    assert one.job.notes.count(COPIED) == 1


@each_forward
def test_a_replica_of_data_parallel_is_the_jobs_own(loop: Any) -> None:
    """A replica runs the job's forward with the weights it is given, not the planned one with the original's."""
    one = loop()
    replica = one.model._replicate_for_data_parallel()
    assert vars(replica).keys() - vars(Net()).keys() == {"_is_replica"}


@each_forward
def test_the_job_may_replace_forward(loop: Any) -> None:
    """A method that accelerate or peft puts in the place of forward, before the plan or after, is called and copied."""

    def doubled(before: Any) -> Any:
        def forward(self: Any, x: torch.Tensor, scale: float = 1.0) -> Any:
            return before(self, x, scale) * 2

        return forward

    one = loop(applied=False)
    one.model.eval()
    wanted = evaluated(one.model, one.x) * 4
    one.model.forward = types.MethodType(doubled(Net.forward), one.model)
    one.apply()
    one.model.forward = types.MethodType(doubled(one.model.forward.__func__), one.model)
    assert torch.allclose(evaluated(one.model, one.x), wanted, atol=0.05)
    duplicate = copy.deepcopy(one.model)
    assert torch.allclose(evaluated(duplicate, one.x), wanted, atol=0.05)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert torch.equal(evaluated(duplicate, one.x), torch.zeros(64, 10))
    one.job.undo()
    assert torch.allclose(evaluated(one.model, one.x), wanted, atol=0.05)


@each_forward
def test_types_with_copies_of_their_own(loop: Any) -> None:
    """A module's own copy and pickle methods behave as without the plan."""

    class Own(torch.nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            new = type(self)(self.in_features, self.out_features)
            for key, value in vars(self).items():
                setattr(new, key, copy.deepcopy(value))  # with no memo, in which it would find itself
            return new

        def __getstate__(self) -> Any:
            return {"inside": dict(vars(self))}

        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state["inside"])

    globals()["Own"] = Own
    Own.__qualname__ = "Own"
    one = loop(applied=False)
    one.model.head = Own(16, 10)
    one.optimizer = torch.optim.AdamW(one.model.parameters())
    one.apply()
    one.train(batches=2)
    wanted = Own(16, 10)
    for duplicate in (copy.deepcopy(one.model.head), pickle.loads(pickle.dumps(one.model.head))):
        assert vars(duplicate).keys() == vars(wanted).keys()
        assert torch.equal(duplicate.weight.float(), one.model.state_dict()["head.weight"].float())


@each_forward
def test_plans_on_top_of_each_other_are_taken_back_in_any_order(flag: str) -> None:
    """A second plan on the same model stays when the first is undone, and a copy has neither."""
    one = Loop(flag)
    first = one.apply()
    calls = []

    def counted(before: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return before(*args, **kwargs)

        return forward

    second = Job(one.model, [one.optimizer])
    second.wrap_forward(one.model, counted)
    first.undo()
    evaluated(one.model, one.x)
    assert len(calls) == 1
    evaluated(copy.deepcopy(one.model), one.x)
    assert len(calls) == 1
    second.undo()
    assert vars(one.model).keys() == vars(Net()).keys()


def test_a_file_is_read_where_there_is_no_memprof(tmp_path: Path) -> None:
    """A process that cannot import memprof loads what a job under a plan saved, and computes what the job computed."""
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))\n"
        "    def forward(self, x):\n"
        "        return self.layers(x)\n"
    )
    (tmp_path / "save.py").write_text(
        "import memprof, torch\n"
        "from net import Net\n"
        "from memprof.policies.plan.plan import Plan\n"
        "from memprof.policies.registry import policy_type\n"
        "model, x = Net(), torch.ones(4, 16)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "flags = (('precision', 'pure-bf16'), ('checkpoint', 'layers.0'))\n"
        "memprof.apply(Plan(tuple(policy_type(name).from_flag(text) for name, text in flags)), model, optimizer)\n"
        "model(x).sum().backward(); optimizer.step()\n"
        "plain = Net(); plain.load_state_dict(model.state_dict())\n"
        "torch.save((model, optimizer, x, plain(x)), 'file.pt')\n"
    )
    (tmp_path / "load.py").write_text(
        "import sys; sys.modules['memprof'] = None\n"
        "import torch\n"
        "model, optimizer, x, wanted = torch.load('file.pt', weights_only=False)\n"
        "assert torch.equal(model(x), wanted)\n"
        "optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()\n"
        "assert not torch.equal(model(x), wanted)\n"
    )
    for script in ("save.py", "load.py"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
