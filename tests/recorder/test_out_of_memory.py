"""Which errors mean out of memory, what is parsed from them, and what a recording keeps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import memprof
from memprof.recorder.memory import out_of_memory
from memprof.recorder.memory.out_of_memory import (
    describe_failure,
    describe_full_sharing,
    find_out_of_memory,
    is_out_of_memory,
    listen_to_allocator,
    place_of_failure,
)
from memprof.trace.files.spool import FORWARD, LOADING, OPTIMIZER
from memprof.trace.schema import Ops, Optimizers, OutOfMemory
from memprof.trace.store import Trace

#: More bytes than any process can address: torch asks the system for them, and is refused.
TOO_MANY = 1 << 50


def raised_by_torch() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MANY, dtype=torch.uint8)
    return caught.value


def raised_by_numpy() -> MemoryError:
    with pytest.raises(MemoryError) as caught:
        np.ones(TOO_MANY, dtype=np.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [(140, 100, 100), (40, 100, 10), (40, 4, 4), (25, 100, 0)],
    ids=["no limit", "limit", "fuller device", "limit lowered"],
)
def test_a_process_with_a_limit_has_free_what_it_may_still_take(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, expected: int
) -> None:
    """Under set_per_process_memory_fraction the allocator reports the limit, and the free bytes of the whole device."""
    device = SimpleNamespace(
        is_initialized=lambda: True,
        memory_stats=lambda _: {"allocated_bytes.all.current": 20, "reserved_bytes.all.current": 30},
        memory_snapshot=list,
        mem_get_info=lambda _: (free, 140),
    )
    monkeypatch.setattr(out_of_memory, "_cuda", device)
    reported = {"device": 0, "requested": 50, "total": total, "free": free}
    monkeypatch.setattr(out_of_memory, "_reported", reported)
    found = describe_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 50 bytes."), None)
    assert (found["free_bytes"], found["total_bytes"], found["reserved_bytes"]) == (expected, total, 30)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:75] . not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB). Tried to allocate 256 bytes on shared pool."),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
    ids=["cuda", "windows", "mapped", "mps", "driver", "python"],
)
def test_errors_that_say_so(error: BaseException) -> None:
    """Every wording that torch has for it is known, as are torch's own type and Python's."""
    assert is_out_of_memory(error)


def test_real_errors_say_so() -> None:
    """The errors that torch and numpy raise on this machine are known, with the bytes that were asked for."""
    for error in (raised_by_torch(), raised_by_numpy()):
        assert is_out_of_memory(error)
    assert describe_failure(raised_by_torch(), None)["requested_bytes"] == TOO_MANY
    assert describe_failure(raised_by_numpy(), None)["requested_bytes"] == TOO_MANY


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 cannot be multiplied"), ValueError("Cannot allocate memory"), KeyError(1)]
)
def test_other_errors_do_not(error: BaseException) -> None:
    """What fails for another reason is none, whatever it says."""
    assert not is_out_of_memory(error)


def test_device_and_size_of_a_device_error() -> None:
    """The size is read with its unit, the device with its number; without CUDA, its figures are unknown."""
    text = (
        "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 1 has a total capacity of 23.54 GiB of which 11.00 MiB "
        "is free. Including non-PyTorch memory, this process has 23.52 GiB memory in use."
    )
    record = describe_failure(torch.OutOfMemoryError(text + "\nSee documentation"), None)
    assert (record["device"], record["requested_bytes"]) == ("cuda:1", 41 << 19)
    assert record["message"] == text
    if not torch.cuda.is_available():
        listen_to_allocator()  # without CUDA there is nobody to listen to
        assert record["reserved_bytes"] is None


def test_found_behind_another_error() -> None:
    """It is found as the cause of what ended the job, or as what was being handled; not where that was cut off."""
    first = MemoryError("first")
    caused, handling, cut = ValueError(), ValueError(), ValueError()
    caused.__cause__ = first
    handling.__context__ = first
    cut.__context__, cut.__suppress_context__ = first, True
    assert find_out_of_memory(caused) is first
    assert find_out_of_memory(handling) is first
    assert find_out_of_memory(cut) is None
    assert find_out_of_memory(None) is None


class UnprintableError(RuntimeError):
    """A job's error that fails when it is asked for its text."""

    def __str__(self) -> str:
        raise KeyError("text")


def test_full_sharing_is_found_behind_the_loaders_error() -> None:
    """torch raises its error of a worker that exited from the one that names shared memory."""
    bus = RuntimeError(
        "DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory."
    )
    exited = RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly")
    exited.__cause__ = bus
    full = OSError(28, "No space left on device: shared memory")
    for error in (bus, exited, full):
        assert "/dev/shm was full" in describe_full_sharing(error)
    assert describe_full_sharing(ValueError(str(bus))) == ""
    assert describe_full_sharing(None) == ""


def test_errors_that_cannot_be_printed_end_no_recording() -> None:
    """One behind them is found all the same."""
    error = UnprintableError()
    error.__context__ = first = MemoryError()
    assert find_out_of_memory(error) is first
    assert describe_full_sharing(error) == ""
    assert describe_failure(error, None)["message"] == "UnprintableError"


class Greedy(torch.nn.Module):
    """Requests too much memory on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.is_greedy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x + torch.ones(TOO_MANY, dtype=torch.uint8) if self.is_greedy else x


def test_place_by_the_traceback() -> None:
    """A traceback gives the phase, the innermost module and the line, innermost frame first."""
    model = Greedy()
    model.is_greedy = True
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 4))
    place = place_of_failure(caught.value)
    assert place["phase"] == FORWARD
    assert place["module"] is model
    assert place["frames"][0].endswith(":forward")
    assert "test_out_of_memory.py" in place["frames"][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        raise MemoryError

    with pytest.raises(MemoryError) as during:
        optimizer.step(closure)
    assert place_of_failure(during.value)["phase"] == OPTIMIZER


def test_job_that_catches_it(tmp_path: Path) -> None:
    """A request that fails and is caught is one row, with operator, module and size; nothing of it is kept alive."""
    model = Greedy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    witnesses = []
    with memprof.record(tmp_path / "run.memprof", skip=0, steps=2):
        for step in range(4):
            model.is_greedy = step == 1
            x = torch.ones(2, 4)
            try:
                model(x).sum().backward()
            except RuntimeError:
                witnesses.append(weakref.ref(x))
            del x
            gc.collect()
            if model.is_greedy:
                assert witnesses[0]() is None
                model.is_greedy = False
                model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(witnesses) == 1
    trace = Trace.open(tmp_path / "run.memprof")
    failures, ops = trace.table(OutOfMemory), trace.table(Ops)
    assert len(failures) == 1
    assert failures.requested_bytes[0] == TOO_MANY
    assert failures.is_caught[0]
    assert (failures.step[0], failures.phase[0], failures.name[0]) == (1, "forward", "aten.ones.default")
    assert ops.name[failures.op_id[0]] == "aten.ones.default"
    assert failures.free_bytes[0] <= failures.total_bytes[0]
    for number in trace.recorded_steps:
        trace.step(number).check()
    optimizers = trace.table(Optimizers)
    assert optimizers.name.tolist() == ["torch.optim.adam.Adam"]
    assert optimizers.parameters[0] == 2
    # exp_avg and exp_avg_sq of 20 elements, and a step of 4 bytes for each of two parameters.
    assert optimizers.state_bytes[0] == optimizers.full_state_bytes[0] == 2 * 80 + 2 * 4


def test_requests_beyond_every_machine_are_cut_and_leave_a_recording(tmp_path: Path) -> None:
    """A script probes memory with 4 EiB in each step, catches the errors, and is recorded like any other."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof"):
        for _ in range(6):
            model(torch.randn(4, 8)).sum().backward()
            with pytest.raises(RuntimeError, match="you tried to allocate"):
                torch.empty(2**60)
            optimizer.step()
    trace = Trace.open(tmp_path / "run.memprof")
    failures = trace.table(OutOfMemory)
    assert len(trace.recorded_steps) == 3
    assert len(failures) >= 3
    assert set(failures.requested_bytes) == {2**60}
    assert failures.is_caught.all()


def test_error_that_ends_the_block(tmp_path: Path) -> None:
    """The error that ends a recorded block propagates, and the recording says that it ended it."""
    model = Greedy()
    torch.optim.SGD(model.parameters(), lr=0.1)
    model.is_greedy = True
    with (
        pytest.raises(RuntimeError, match="DefaultCPUAllocator"),
        memprof.record(tmp_path / "run.memprof", skip=0, steps=1),
    ):
        model(torch.ones(2, 4))
    failures = Trace.open(tmp_path / "run.memprof").table(OutOfMemory)
    assert failures.is_caught.tolist() == [False]
    assert failures.step.tolist() == [0]


def test_error_outside_operators(tmp_path: Path) -> None:
    """Failed requests of Python or numpy are reported too, from the traceback."""
    model = Greedy()

    def train() -> None:
        with memprof.record(tmp_path / "run.memprof", skip=0, steps=1):
            model(torch.ones(2, 4)).sum().backward()
            np.ones(TOO_MANY, dtype=np.uint8)

    with pytest.raises(MemoryError):
        train()
    trace = Trace.open(tmp_path / "run.memprof")
    failures = trace.table(OutOfMemory)
    assert (failures.name.tolist(), failures.is_caught.tolist()) == ([""], [False])
    assert failures.requested_bytes.tolist() == [TOO_MANY]
    assert failures.op_id[0] == len(trace.table(Ops)) - 1


def test_place_while_a_checkpoint_is_loaded() -> None:
    """What `load_state_dict` does is loading, although it is a method of a module."""

    class Greedy(torch.nn.Linear):
        def _load_from_state_dict(self, *args: object) -> None:
            raise MemoryError

    model = torch.nn.Sequential(Greedy(2, 2))
    with pytest.raises(MemoryError) as caught:
        model.load_state_dict(model.state_dict())
    place = place_of_failure(caught.value)
    assert (place["phase"], place["module"]) == (LOADING, None)
