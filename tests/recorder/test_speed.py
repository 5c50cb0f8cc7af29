"""The device's speed at the end of a job, on a stand-in for CUDA whose clock is exact."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from memprof.recorder.profiler.timing import FILE_NAME, measure_cuda, write_device_speed
from memprof.trace.manifest import Speed

#: The stand-in: 1000 bytes a microsecond each way in memory, 10 over the link, 1e6 operations in fp32, 4e6 in bf16.
MEMORY, LINK, FP32, BF16 = 1000.0, 10.0, 1e6, 4e6


class FakeTensor:
    def __init__(self, device: FakeTorch, size: int, item: int, place: str) -> None:
        self.device, self.size, self.item, self.place = device, size, item, place
        if place == "cuda":
            device.taken.append(size * item)

    def copy_(self, other: FakeTensor, *, non_blocking: bool = False) -> None:
        assert self.size == other.size
        crosses = self.place != other.place
        assert non_blocking == crosses  # else the host waits, and its time is measured
        self.device.clock_us += self.size / LINK if crosses else 2 * self.size / MEMORY

    def __getitem__(self, part: slice) -> FakeTensor:
        view = FakeTensor(self.device, 0, 1, "view")
        view.size, view.place = part.stop, self.place
        return view


class FakeTorch:
    """As much of torch as measuring takes. Any other name would raise: nothing else is touched, no random number."""

    uint8, float32, bfloat16 = 1, 4, 2

    def __init__(self, free: int = 8 * 2**30, *, is_initialized: bool = True) -> None:
        self.clock_us, self.free, self.taken, self.runs = 0.0, free, list[int](), 0
        self.cuda = FakeCuda(self, is_initialized)

    def no_grad(self) -> Any:
        return nullcontext()

    def full(
        self, shape: tuple[int, ...], value: float, *, dtype: int, device: str = "cpu", pin_memory: bool = False
    ) -> FakeTensor:
        assert device == "cuda" or pin_memory
        return FakeTensor(self, shape[0] * (shape[1] if len(shape) > 1 else 1), dtype, device)

    def empty_like(self, other: FakeTensor) -> FakeTensor:
        return FakeTensor(self, other.size, other.item, other.place)

    def matmul(self, left: FakeTensor, right: FakeTensor, *, out: FakeTensor) -> None:
        rows = int(left.size**0.5)
        self.clock_us += 2 * rows**3 / (FP32 if left.item == 4 else BF16)


class FakeCuda:
    def __init__(self, device: FakeTorch, is_initialized: bool) -> None:
        self._device, self._is_initialized = device, is_initialized

    def is_initialized(self) -> bool:
        return self._is_initialized

    def synchronize(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return self._device.free, 2 * self._device.free

    def memory_reserved(self) -> int:
        return 100

    def memory_allocated(self) -> int:
        return 100

    def is_bf16_supported(self) -> bool:
        return True

    def get_device_name(self) -> str:
        return "a stand-in"

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802 - as torch calls it
        assert enable_timing
        return FakeEvent(self._device)


class FakeEvent:
    def __init__(self, device: FakeTorch) -> None:
        self._device, self.at_us = device, 0.0

    def record(self) -> None:
        self.at_us = self._device.clock_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at_us - self.at_us) / 1e3


def test_rates_are_those_of_the_device() -> None:
    """From sizes and the device's clock come the rates that the stand-in was given."""
    speed = Speed.from_json(measure_cuda(FakeTorch()))
    assert round(speed.memory_bytes_per_us, 6) == MEMORY
    assert round(speed.to_host_bytes_per_us, 6) == round(speed.from_host_bytes_per_us, 6) == LINK
    assert round(speed.fp32_flops_per_us) == FP32
    assert round(speed.bf16_flops_per_us) == BF16
    assert speed.how == "measured with torch on a stand-in at the end of the job"


def test_no_more_than_a_quarter_of_what_is_free_is_taken() -> None:
    """On a nearly full device little is taken, and what then cannot be measured is left out."""
    device = FakeTorch(free=64 * 2**20)
    speed = measure_cuda(device)
    assert sum(device.taken) <= 16 * 2**20
    assert "memory_bytes_per_us" in speed
    assert "fp32_flops_per_us" not in speed
    full = FakeTorch(free=2**20)
    assert set(measure_cuda(full)) == {"how"}
    assert not full.taken


def test_speed_is_written_beside_the_recording(tmp_path: Path) -> None:
    """The process's folder holds the speed, for the one who assembles the trace."""
    write_device_speed(tmp_path, FakeTorch())
    assert Speed.from_json(json.loads((tmp_path / FILE_NAME).read_text())).fp32_flops_per_us > 0


def test_device_in_trouble_is_written_down(tmp_path: Path) -> None:
    """A device that fails after the job leaves a message, and raises nothing at the job's end."""
    broken = FakeTorch()
    broken.matmul = None  # type: ignore[method-assign, assignment]
    write_device_speed(tmp_path, broken)
    assert json.loads((tmp_path / FILE_NAME).read_text())["how"].startswith("not measured: TypeError")
