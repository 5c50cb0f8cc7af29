"""Megatron-Core: a small GPT of its local layers, by the job of the distributed dry runs.  [OPTION]...

Without a GPU it trains on the processor, over gloo: the names of CUDA that Megatron-Core uses are then answered with
the processor's. Started without torchrun, it is one rank.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import torch

JOB = Path(__file__).parents[3] / "tests" / "virtual" / "rank_jobs" / "megatron_gpt.py"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}


def _on_processor(make):
    def made(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def answer_for_cuda():
    """Makes what asks for the current CUDA device receive the processor."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "current_stream"):
        setattr(torch.cuda, name, lambda *_: None)  # one function for each: torch's compiler has a rule for each
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda value, *_: value
    kind = torch.Tensor.type
    torch.Tensor.type = lambda value, *args: (
        kind(value, *args) if args else kind(value).replace("torch.", "torch.cuda.")
    )
    for name in ("arange", "empty", "full", "ones", "randint", "tensor", "zeros"):
        setattr(torch, name, _on_processor(getattr(torch, name)))
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, **__: start("gloo")
    from megatron.core import tensor_parallel

    class Tracker:
        """The processor has one state of random numbers."""

        def fork(self, *_):
            return contextlib.nullcontext()

        def get_states(self):
            return {}

        def is_initialized(self):
            return True

    tracker = Tracker()
    for module in [each for name, each in sys.modules.items() if name.startswith("megatron.")]:
        if hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_, **__: tracker
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None


if "RANK" not in os.environ:
    os.environ.update(ALONE)
if not torch.cuda.is_available():
    answer_for_cuda()
sys.argv[0] = str(JOB)
runpy.run_path(str(JOB), run_name="__main__")
