"""Gradients averaged in buckets, with a single rank, over which the average is the gradient itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from memprof.policies.shard.averaging import Averaging


class Net(torch.nn.Module):
    """Two layers in use and one that is not; a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.last = torch.nn.Linear(3, 2)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).mean((2, 3)))


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    """One rank, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(bucket_mib: int | None, *, times: int, sets_to_none: bool = True) -> Net:
    """Runs some backwards of the same model, averaged in buckets of that size or, for None, not averaged."""
    torch.manual_seed(5)
    net = Net()
    averaging = None if bucket_mib is None else Averaging(net, bucket_mib)
    if averaging is not None:
        averaging.install()
    for _ in range(times):
        net.zero_grad(set_to_none=sets_to_none)
        net(torch.randn(2, 2, 4, 4)).square().sum().backward()
    if averaging is not None:
        averaging.remove()
    return net


def gradients(net: Net) -> dict[str, torch.Tensor]:
    """Returns the gradients there are, by name."""
    return {name: each.grad for name, each in net.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_gradients_are_those_of_the_plain_model(times: int, *, sets_to_none: bool) -> None:
    """Equal to the bit, in the first backward, which makes the buckets, and in later ones, which fill them."""
    plain = gradients(trained(None, times=times, sets_to_none=sets_to_none))
    averaged = gradients(trained(25, times=times, sets_to_none=sets_to_none))
    assert plain.keys() == averaged.keys() == {"first.weight", "first.bias", "last.weight", "last.bias"}
    for name, gradient in plain.items():
        assert torch.equal(gradient, averaged[name]), name
        assert gradient.stride() == averaged[name].stride(), name


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_lie_in_one_bucket(times: int) -> None:
    """They share a buffer as large as all parameters: 54 and 3 numbers, 6 and 2, and 20 without a gradient."""
    net = trained(25, times=times)
    buffers = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in gradients(net).values()}
    assert list(buffers.values()) == [(54 + 3 + 6 + 2 + 20) * 4]
    places = sorted((each.storage_offset(), each.numel()) for each in gradients(net).values())
    assert all(first + size <= start for (first, size), (start, _) in itertools.pairwise(places))


def test_gradients_in_place_keep_their_buffer() -> None:
    """Gradients set to zero stay in the bucket, and what is added to them does too."""
    torch.manual_seed(5)
    net = Net()
    averaging = Averaging(net, 25)
    averaging.install()
    for _ in range(2):
        net.zero_grad(set_to_none=False)
        net(torch.randn(2, 2, 4, 4)).square().sum().backward()
    places = {name: each.data_ptr() for name, each in gradients(net).items()}
    net.zero_grad(set_to_none=False)
    net(torch.randn(2, 2, 4, 4)).square().sum().backward()
    assert {name: each.data_ptr() for name, each in gradients(net).items()} == places
    averaging.remove()


def test_accumulated_gradients_are_averaged_once_more() -> None:
    """Two backwards without clearing add up, as they do without averaging."""

    def accumulated(bucket_mib: int | None) -> Net:
        torch.manual_seed(6)
        net = Net()
        averaging = None if bucket_mib is None else Averaging(net, bucket_mib)
        if averaging is not None:
            averaging.install()
        for _ in range(2):
            net(torch.randn(2, 2, 4, 4)).square().sum().backward()
        return net

    plain, averaged = gradients(accumulated(None)), gradients(accumulated(25))
    assert all(torch.equal(plain[name], averaged[name]) for name in plain)


def test_after_removal_nothing_is_moved() -> None:
    """Gradients of later backwards have memory of their own."""
    net = trained(25, times=2)
    net.zero_grad()
    net(torch.randn(2, 2, 4, 4)).square().sum().backward()
    assert len({each.untyped_storage().data_ptr() for each in gradients(net).values()}) == 4
