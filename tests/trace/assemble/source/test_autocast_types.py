"""What a job's code makes in autocast's type is read off its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.assemble.source.autocast_types import find_autocast_types
from memprof.trace.schema import NONE, Ops, Stacks

SOURCE = """\
def named(x):
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    buffer = torch.empty(4, dtype=kind)
    other = torch.empty(4, dtype=x.dtype)
    return buffer, other


def unnamed(x):
    kind = torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else x.dtype
    return torch.zeros(4, dtype=kind)


def kind_of(x):
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def through_a_function(x):
    kind = kind_of(x)
    first = torch.zeros(
        4,
        dtype=kind,
    )
    return first, torch.ones(4, dtype=kind_of(x))


def broken(x):
"""
PLACES = {
    "asked on the processor": "3:named",
    "like another": "4:named",
    "asked on a device": "10:unnamed",
    "by a variable": "20:through_a_function",
    "by a call": "22:through_a_function",
    "no code": "90:gone",
}
#: Those found wherever the job runs.
ANYWHERE = {"by a variable", "by a call"}


@pytest.mark.parametrize(("on_device", "where"), [(False, "asked on the processor"), (True, "asked on a device")])
def test_tensors_made_in_autocasts_type(tmp_path: Path, on_device: bool, where: str) -> None:
    """Through a variable or a function of the file, but not the type of autocast on the other kind of device."""
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    ids = list(range(len(PLACES)))
    ops = Ops.of(op_id=[*ids, len(ids)], stack_id=[*ids, NONE], name=["aten.empty.memory_format"] * (len(ids) + 1))
    stacks = Stacks.of(stack_id=ids, frames=[f"{path}:{place}" for place in PLACES.values()])
    found = find_autocast_types(ops, stacks, on_device=on_device)
    assert {list(PLACES)[number] for number in found} == ANYWHERE | {where}
