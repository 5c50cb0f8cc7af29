"""Module calls are observed without any visible change to the job."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from memprof.recorder.calls.modules import ModuleCallObserver
from memprof.trace.schema import Modules
from memprof.trace.store import Trace
from tests.recorder.conftest import RecordJob

_FUNCTION = nn.Module._wrapped_call_impl
_ORIGINAL = _FUNCTION.__code__


class Calls:
    """Notes entries and exits."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.ignores: type[nn.Module] | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.ignores is not None and isinstance(module, self.ignores):
            return None
        self.seen.append(("enter", type(module).__name__))
        return type(module).__name__

    def leave(self, token: Any, error: BaseException | None) -> None:
        self.seen.append(("leave", token if error is None else (token, type(error).__name__)))


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def observer(calls: Calls) -> Iterator[ModuleCallObserver]:
    observer = ModuleCallObserver(calls.enter, calls.leave)
    yield observer
    observer.remove()


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).missing_attribute

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()


def test_calls_are_entered_and_left_in_order(calls: Calls, observer: ModuleCallObserver) -> None:
    """From the outermost to the innermost and back; results are what they were."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    expected = model(torch.ones(1, 2))
    observer.install()
    assert torch.equal(model(torch.ones(1, 2)), expected)
    kinds = [f"{what} {who}" for what, who in calls.seen]
    assert kinds == [
        "enter Sequential", "enter Linear", "leave Linear", "enter ReLU", "leave ReLU", "leave Sequential",
    ]  # fmt: skip


def test_torchs_own_code_is_put_back(calls: Calls, observer: ModuleCallObserver) -> None:
    """The very code object, however often installed and removed; no call is observed afterwards."""
    observer.install()
    observer.install()
    assert _FUNCTION.__code__ is not _ORIGINAL
    observer.remove()
    observer.remove()
    assert _FUNCTION.__code__ is _ORIGINAL
    nn.ReLU()(torch.ones(1))
    assert calls.seen == []


def test_the_observed_method_looks_like_torchs_own(observer: ModuleCallObserver) -> None:
    """Same file, name and first line, same arguments: signatures and tracebacks are identical."""
    signature = inspect.signature(_FUNCTION)
    observer.install()
    code = _FUNCTION.__code__
    for attribute in ("co_filename", "co_name", "co_qualname", "co_firstlineno", "co_argcount", "co_flags"):
        assert getattr(code, attribute) == getattr(_ORIGINAL, attribute)
    assert inspect.signature(_FUNCTION) == signature


def test_a_call_that_is_not_to_be_observed_is_not_left(calls: Calls, observer: ModuleCallObserver) -> None:
    """Where entering returns None, there is nothing to leave."""
    calls.ignores = nn.Sequential
    observer.install()
    nn.Sequential(nn.ReLU())(torch.ones(1))
    assert calls.seen == [("enter", "ReLU"), ("leave", "ReLU")]


def test_errors_leave_every_call_once(calls: Calls, observer: ModuleCallObserver) -> None:
    """The error propagates, and each call around it is closed; exits of the interpreter too."""
    observer.install()
    with pytest.raises(AttributeError):
        nn.Sequential(Failing())(torch.ones(1))
    assert calls.seen[-2:] == [("leave", ("Failing", "AttributeError")), ("leave", ("Sequential", "AttributeError"))]
    model = nn.Identity()
    model.forward = lambda x: sys.exit(3)
    with pytest.raises(SystemExit):
        model(None)
    assert calls.seen[-1] == ("leave", ("Identity", "SystemExit"))


def test_a_call_under_way_when_observing_ends_is_left(calls: Calls, observer: ModuleCallObserver) -> None:
    """The window can close inside a forward."""
    model = nn.Identity()
    model.forward = lambda x: observer.remove()
    observer.install()
    model(None)
    assert calls.seen == [("enter", "Identity"), ("leave", "Identity")]


def text_of_failure(function: Callable[[], object]) -> str:
    try:
        function()
    except AttributeError:
        return traceback.format_exc()
    raise AssertionError("it did not fail")


def test_tracebacks_are_the_same_to_the_character(observer: ModuleCallObserver) -> None:
    """Lines, columns and number of frames, hooks of the user's own or not."""
    plain, hooked = nn.Sequential(Failing()), nn.Sequential(Failing())
    hooked.register_forward_hook(lambda module, args, output: None)
    for model in (plain, hooked):
        texts = []
        for install in (False, True):
            if install:
                observer.install()
            texts.append(text_of_failure(lambda model=model: model(torch.ones(1))))
        observer.remove()
        assert texts[0] == texts[1]
        assert "missing_attribute" in texts[0]


def test_the_stack_seen_from_inside_is_the_same() -> None:
    """A forward that looks at its callers, as logging and lazy loaders do, finds the same lines."""

    def look() -> list[tuple[str, int]]:
        frame: FrameType | None = sys._getframe(1)
        lines = []
        while frame is not None and frame.f_code.co_name != "seen_by_forward":
            lines.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        return lines

    model = nn.Identity()
    model.forward = lambda x: look()

    def seen_by_forward() -> list[tuple[str, int]]:
        return model(None)

    expected = seen_by_forward()
    observer = ModuleCallObserver(lambda *_: 1, lambda *_: None)
    observer.install()
    found = seen_by_forward()
    observer.remove()
    assert found == expected


def test_another_call_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch's method has no source, or is a closure, it is not re-compiled: the reason is reported."""
    monkeypatch.setattr(inspect, "getsourcelines", lambda _: (_ for _ in ()).throw(OSError("no source")))
    with pytest.raises(RuntimeError, match=r"its source is missing"):
        ModuleCallObserver(lambda *_: None, lambda *_: None)
    monkeypatch.undo()
    inside = nn.Module._wrapped_call_impl

    def closure(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inside(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_wrapped_call_impl", closure)
    with pytest.raises(RuntimeError, match="is a closure"):
        ModuleCallObserver(lambda *_: None, lambda *_: None)


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).relu())


def train(model: nn.Module, steps: int = 3) -> Callable[[], list[torch.Tensor]]:
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def job() -> list[torch.Tensor]:
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return job


def operators_of(trace: Trace, step: int, module: str, phase: str) -> list[str]:
    """Returns the operators of a module in a phase, without those that only make views."""
    ops = trace.step(step).ops
    number = list(trace.table(Modules).name).index(module)
    names = [name.split(".")[1] for name in ops.name[(ops.module_id == number) & (ops.phase == phase)]]
    return [name for name in names if name not in ("t", "view", "detach", "expand")]


def test_operators_are_those_of_the_innermost_module(record_job: RecordJob) -> None:
    """Forward and backward of a layer called twice are all its own; what its model does itself is the model's."""
    trace = record_job(train(Twice()))
    assert operators_of(trace, 1, "layer", "forward") == ["addmm", "addmm"]
    assert operators_of(trace, 1, "", "forward") == ["relu"]
    # Of each call the input's gradient (the first call's input needs none), the weight's and the bias's, and then
    # where the gradients of both calls meet.
    assert operators_of(trace, 1, "layer", "backward") == ["mm", "mm", "sum", "mm", "sum", "add", "add"]
    assert operators_of(trace, 1, "", "backward") == ["threshold_backward"]


def test_every_call_is_told(record_job: RecordJob) -> None:
    """Each call of a module used twice, with the call around it."""
    trace = record_job(train(Twice()))
    calls = trace.step(1).module_calls
    names = list(trace.table(Modules).name)
    assert [names[module] for module in calls.module_id] == ["", "layer", "layer"]
    assert calls.parent_call_id.tolist() == [-1, 0, 0]
    assert not calls.is_recompute.any()
