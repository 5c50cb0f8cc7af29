"""How a process of torchrun finds its device, and which ranks communicate through gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from memprof.errors import PolicyError
from memprof.policies.shard.process_group import choose_device, is_gloo

#: Local rank 1 of two on this machine; there are four ranks on two machines.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables that torchrun sets, and none that selects devices."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return monkeypatch


def devices(monkeypatch: pytest.MonkeyPatch, count: int, *, works: bool = True) -> None:
    """Lets torch count some devices, which this machine need not have."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works and count > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def visible() -> str | None:
    """Returns which devices the process may use, None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_each_rank_of_a_machine_gets_one_of_its_devices(environment: pytest.MonkeyPatch) -> None:
    """Two ranks of four are on this machine, which therefore needs two devices."""
    devices(environment, 2)
    choose_device()
    assert visible() == "1"


def test_the_devices_that_the_job_may_use_are_divided(environment: pytest.MonkeyPatch) -> None:
    """Names, and numbers out of order, keep their places; blanks between them do not count."""
    environment.setenv("CUDA_VISIBLE_DEVICES", "GPU-5, GPU-3,")
    devices(environment, 2)
    choose_device()
    assert visible() == "GPU-3"


def test_without_a_count_for_the_machine_all_ranks_are_on_it(environment: pytest.MonkeyPatch) -> None:
    """Other launchers set no LOCAL_WORLD_SIZE: four ranks do not fit on two devices."""
    environment.delenv("LOCAL_WORLD_SIZE")
    devices(environment, 2)
    with pytest.raises(PolicyError, match="shard has 4 ranks on this machine, which has 2 CUDA devices:"):
        choose_device()
    assert visible() is None


def test_one_device_for_two_ranks_is_an_error(environment: pytest.MonkeyPatch) -> None:
    """The sentence counts the devices."""
    devices(environment, 1)
    with pytest.raises(PolicyError, match="shard has 2 ranks on this machine, which has 1 CUDA device: start"):
        choose_device()


@pytest.mark.parametrize(("count", "works"), [(0, False), (1, False)])
def test_ranks_train_on_the_cpu_without_a_device_that_works(
    environment: pytest.MonkeyPatch, count: int, *, works: bool
) -> None:
    """A driver may count a device that torch cannot use; nothing is chosen then."""
    devices(environment, count, works=works)
    choose_device()
    assert visible() is None


def test_two_devices_count_where_torch_is_not_asked_whether_they_work(environment: pytest.MonkeyPatch) -> None:
    """Whether they work cannot be tried before one is chosen."""
    devices(environment, 2, works=False)
    choose_device()
    assert visible() == "1"


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR"])
def test_a_job_without_ranks_chooses_no_device(environment: pytest.MonkeyPatch, missing: str) -> None:
    """Every variable of torchrun is needed."""
    environment.delenv(missing)
    devices(environment, 2)
    choose_device()
    assert visible() is None


def test_a_process_that_uses_a_device_keeps_it(environment: pytest.MonkeyPatch) -> None:
    """After CUDA is initialised the variable has no effect."""
    devices(environment, 2)
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    choose_device()
    assert visible() is None


@pytest.fixture(params=["fake", "gloo"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process group of this process: that of a dry run, or gloo's."""
    store = FakeStore() if request.param == "fake" else dist.HashStore()
    dist.init_process_group(request.param, store=store, rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_a_dry_run_takes_the_backend_that_the_device_would_have(backend: str) -> None:
    """In a dry run nothing is sent: on a CPU the ranks would use gloo, on CUDA NCCL."""
    assert is_gloo(torch.device("cpu"))
    assert is_gloo(torch.device("cuda")) == (backend == "gloo")
