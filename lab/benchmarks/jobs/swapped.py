"""Trains a GPT whose layers' saved tensors stay, or are moved to disk or host memory in one of several ways.

Prints the microseconds of each step as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import tempfile
import time
import uuid
from pathlib import Path

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from tests.policies.jobs import gpt

MINIMUM_BYTES = 1 << 16


class TensorFile:
    """A saved tensor in a file of its own, as PyTorch's tutorial on saved tensor hooks does it."""

    def __init__(self, folder: Path, tensor: torch.Tensor) -> None:
        self.path = folder / uuid.uuid4().hex
        torch.save(tensor, self.path)

    def __del__(self) -> None:
        self.path.unlink()


def hooks(how: str, folder: Path, parameters: set[int]) -> contextlib.AbstractContextManager[object]:
    def pack(tensor: torch.Tensor) -> object:
        is_small = tensor.untyped_storage().nbytes() < MINIMUM_BYTES
        is_parameter = tensor.untyped_storage().data_ptr() in parameters
        return tensor if is_small or is_parameter else TensorFile(folder, tensor)

    def unpack(packed: object) -> torch.Tensor:
        return torch.load(packed.path) if isinstance(packed, TensorFile) else packed  # type: ignore[return-value]

    return save_on_cpu() if how == "save_on_cpu" else saved_tensors_hooks(pack, unpack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=("plain", "save_on_cpu", "files", "memprof"), required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.large:
        gpt.LENGTH, gpt.WIDTH, gpt.LAYERS = 256, 192, 6
    model = gpt.make_model()
    optimizer = gpt.make_optimizer(model)
    batch = next(iter(gpt.make_loader()))
    with tempfile.TemporaryDirectory() as folder:
        if args.how == "memprof":
            Swap(modules=("layers.*",), to="disk", minimum_bytes=MINIMUM_BYTES).apply(Job(model, [optimizer]))
        elif args.how != "plain":
            parameters = {p.data_ptr() for p in model.parameters()}
            for layer in model.layers:
                layer.forward = functools.partial(_hooked, layer.forward, args.how, Path(folder), parameters)
        steps_us = []
        for _ in range(args.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = gpt.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            steps_us.append((time.perf_counter() - start) * 1e6)
            value = loss.item()
            del loss
    print(json.dumps({"steps_us": steps_us, "loss": value}))


def _hooked(forward, how: str, folder: Path, parameters: set[int], x: torch.Tensor) -> torch.Tensor:
    with hooks(how, folder, parameters):
        return forward(x)


if __name__ == "__main__":
    main()
