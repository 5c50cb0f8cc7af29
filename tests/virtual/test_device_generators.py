"""Random generators of the virtual GPU: their states, which jobs save, restore and share."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import record_script

JOB = """
import torch
generator = torch.Generator("cuda")
default = torch.cuda.default_generators[0]
made = torch.Generator().manual_seed(3)
print(generator.device.type, made.device.type, made.initial_seed())
print(*(isinstance(each, torch.Generator) for each in (generator, made, torch.default_generator)))
torch.cuda.manual_seed(5)
state = torch.cuda.get_rng_state()
torch.cuda.manual_seed(7)
default.set_state(state.clone())  # as Megatron-Core does, for each of its states
print(torch.cuda.initial_seed(), state.dtype, len(state), torch.equal(state, torch.cuda.get_rng_state()))
other = default.clone_state()
other.set_offset(8)
print(default.get_offset(), other.get_offset())
default.graphsafe_set_state(other)
print(default.get_offset(), default.graphsafe_get_state().get_offset())
try:
    default.set_state(torch.get_rng_state())
except RuntimeError as error:
    print(error)
torch.manual_seed(9)
print(torch.cuda.initial_seed())
pinned = torch.tensor([1, 2], pin_memory=True)
print(pinned.tolist(), pinned.is_pinned(), torch.tensor([1]).is_pinned())
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.random.fork_rng():
        model(torch.rand(4, 8, device="cuda", generator=generator)).sum().backward()
    optimizer.step()
"""


def test_a_generator_of_the_gpu_has_a_seed_and_an_offset(tmp_path: Path) -> None:
    """One of the processor would refuse its states, and have another device."""
    ended = record_script(tmp_path, JOB, "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "cuda cpu 3",
        "True True True",
        "5 torch.uint8 16 True",
        "0 8",
        "8 8",
        "RNG state is wrong size",
        "9",
        "[1, 2] True False",
    ]
